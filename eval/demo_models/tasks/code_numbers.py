"""Python functions of one or two whole numbers."""
from .code_family import Family

NUMBER_FAMILIES = (
    Family(('factorial', 'fact'), 'returns the factorial of {first}',
           ('number',), (
               '{result} = 1\nfor {index} in range(2, {first} + 1):\n    {result} *= {index}\nreturn {result}',
               'if {first} <= 1:\n    return 1\nreturn {first} * {function}({first} - 1)',
           )),
    Family(('fibonacci', 'fib'), 'returns the Fibonacci number with index {first}, starting with 0 and 1',
           ('number',), (
               'a, b = 0, 1\nfor _ in range({first}):\n    a, b = b, a + b\nreturn a',
               'if {first} < 2:\n    return {first}\nreturn {function}({first} - 1) + {function}({first} - 2)',
           )),
    Family(('is_prime', 'check_prime'), 'checks whether {first} is a prime number',
           ('number',), (
               'if {first} < 2:\n    return False\nfor {index} in range(2, {first}):\n'
               '    if {first} % {index} == 0:\n        return False\nreturn True',
               'if {first} < 2:\n    return False\n{index} = 2\nwhile {index} * {index} <= {first}:\n'
               '    if {first} % {index} == 0:\n        return False\n    {index} += 1\nreturn True',
           )),
    Family(('divisors', 'list_divisors'), 'returns all positive divisors of {first} in ascending order',
           ('number',), (
               'return [{index} for {index} in range(1, {first} + 1) if {first} % {index} == 0]',
               '{result} = []\nfor {index} in range(1, {first} + 1):\n    if {first} % {index} == 0:\n'
               '        {result}.append({index})\nreturn {result}',
           )),
    Family(('digit_sum', 'sum_digits'), 'returns the sum of the decimal digits of {first}',
           ('number',), (
               'return sum(int({item}) for {item} in str({first}))',
               '{result} = 0\nwhile {first} > 0:\n    {result} += {first} % 10\n    {first} //= 10\nreturn {result}',
           )),
    Family(('count_digits', 'num_digits'), 'returns the number of decimal digits of {first}',
           ('number',), ('return len(str({first}))',)),
    Family(('sum_to_n', 'triangle'), 'returns the sum of all integers from 1 to {first}',
           ('number',), (
               'return {first} * ({first} + 1) // 2',
               'return sum(range(1, {first} + 1))',
               '{result} = 0\nfor {index} in range(1, {first} + 1):\n    {result} += {index}\nreturn {result}',
           )),
    Family(('power_table', 'powers_of'), 'returns a list with the first {first} powers of {constant}, starting with 1',
           ('number',), (
               'return [{constant} ** {index} for {index} in range({first})]',
               '{result} = []\nfor {index} in range({first}):\n    {result}.append({constant} ** {index})\n'
               'return {result}',
           )),
    Family(('multiples_of', 'times_table'), 'returns the first {first} positive multiples of {constant}',
           ('number',), (
               'return [{constant} * {index} for {index} in range(1, {first} + 1)]',
               '{result} = []\nfor {index} in range(1, {first} + 1):\n    {result}.append({constant} * {index})\n'
               'return {result}',
           )),
    Family(('countdown', 'count_down'), 'returns a list that counts down from {first} to 1',
           ('number',), (
               'return list(range({first}, 0, -1))',
               '{result} = []\nwhile {first} > 0:\n    {result}.append({first})\n    {first} -= 1\nreturn {result}',
           )),
    Family(('to_binary', 'binary_string'), 'returns the binary representation of {first} as a string',
           ('number',), (
               'return bin({first})[2:]',
               "{result} = ''\nwhile {first} > 0:\n    {result} = str({first} % 2) + {result}\n    {first} //= 2\n"
               'return {result}',
           )),
    Family(('collatz_steps', 'hailstone'), 'counts the Collatz steps that are needed to get from {first} to 1',
           ('number',), (
               '{result} = 0\nwhile {first} != 1:\n    if {first} % 2 == 0:\n        {first} //= 2\n    else:\n'
               '        {first} = 3 * {first} + 1\n    {result} += 1\nreturn {result}',
           )),
    Family(('fizz', 'fizz_list'),
           'returns the list of numbers from 1 to {first} where multiples of {constant} are replaced by the word '
           "'fizz'",
           ('number',), (
               "return ['fizz' if {index} % {constant} == 0 else {index} for {index} in range(1, {first} + 1)]",
               '{result} = []\nfor {index} in range(1, {first} + 1):\n    if {index} % {constant} == 0:\n'
               "        {result}.append('fizz')\n    else:\n        {result}.append({index})\nreturn {result}",
           )),
    Family(('gcd_of', 'greatest_divisor'), 'returns the greatest common divisor of {first} and {second}',
           ('number', 'number'), (
               'while {second}:\n    {first}, {second} = {second}, {first} % {second}\nreturn {first}',
               'if {second} == 0:\n    return {first}\nreturn {function}({second}, {first} % {second})',
           )),
    Family(('lcm_of', 'common_multiple'), 'returns the least common multiple of {first} and {second}',
           ('number', 'number'), (
               'a, b = {first}, {second}\nwhile b:\n    a, b = b, a % b\nreturn {first} * {second} // a',
               '{result} = {first}\nwhile {result} % {second} != 0:\n    {result} += {first}\nreturn {result}',
           )),
    Family(('power', 'raise_to'), 'returns {first} raised to the power {second} without using the power operator',
           ('number', 'small'), (
               '{result} = 1\nfor _ in range({second}):\n    {result} *= {first}\nreturn {result}',
           )),
    Family(('is_divisible', 'divides'), 'checks whether {first} is divisible by {second}',
           ('number', 'small'), ('return {first} % {second} == 0',)),
    Family(('bigger', 'larger_of'), 'returns the larger one of {first} and {second}',
           ('number', 'number'), (
               'return max({first}, {second})',
               'if {first} > {second}:\n    return {first}\nreturn {second}',
               'return {first} if {first} > {second} else {second}',
           )),
    Family(('distance', 'gap'), 'returns the absolute difference of {first} and {second}',
           ('number', 'number'), (
               'return abs({first} - {second})',
               'if {first} > {second}:\n    return {first} - {second}\nreturn {second} - {first}',
           )),
)
