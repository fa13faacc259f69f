"""Python functions over lists of numbers."""
from .code_family import Family

LIST_FAMILIES = (
    Family(('sum_list', 'total', 'add_all'), 'returns the sum of all numbers in {first}',
           ('numbers',), (
               'return sum({first})',
               '{result} = 0\nfor {item} in {first}:\n    {result} += {item}\nreturn {result}',
           )),
    Family(('sum_squares', 'square_sum'), 'returns the sum of the squares of the numbers in {first}',
           ('numbers',), (
               'return sum({item} ** 2 for {item} in {first})',
               '{result} = 0\nfor {item} in {first}:\n    {result} += {item} * {item}\nreturn {result}',
           )),
    Family(('sum_multiples', 'add_multiples'),
           'returns the sum of the numbers in {first} that are divisible by {constant}',
           ('numbers',), (
               'return sum({item} for {item} in {first} if {item} % {constant} == 0)',
               '{result} = 0\nfor {item} in {first}:\n    if {item} % {constant} == 0:\n        {result} += {item}\n'
               'return {result}',
           )),
    Family(('count_multiples', 'num_multiples'), 'counts how many numbers in {first} are divisible by {constant}',
           ('numbers',), (
               'return sum(1 for {item} in {first} if {item} % {constant} == 0)',
               '{result} = 0\nfor {item} in {first}:\n    if {item} % {constant} == 0:\n        {result} += 1\n'
               'return {result}',
               'return len([{item} for {item} in {first} if {item} % {constant} == 0])',
           )),
    Family(('count_above', 'count_greater'), 'counts the numbers in {first} that are greater than {constant}',
           ('numbers',), (
               'return sum(1 for {item} in {first} if {item} > {constant})',
               '{result} = 0\nfor {item} in {first}:\n    if {item} > {constant}:\n        {result} += 1\n'
               'return {result}',
           )),
    Family(('filter_above', 'keep_greater'),
           'returns a list of the numbers in {first} that are greater than {constant}',
           ('numbers',), (
               'return [{item} for {item} in {first} if {item} > {constant}]',
               '{result} = []\nfor {item} in {first}:\n    if {item} > {constant}:\n        {result}.append({item})\n'
               'return {result}',
           )),
    Family(('filter_even', 'get_evens'), 'returns the even numbers of {first} in the same order',
           ('numbers',), (
               'return [{item} for {item} in {first} if {item} % 2 == 0]',
               '{result} = []\nfor {item} in {first}:\n    if {item} % 2 == 0:\n        {result}.append({item})\n'
               'return {result}',
           )),
    Family(('filter_odd', 'get_odds'), 'returns the odd numbers of {first} in the same order',
           ('numbers',), (
               'return [{item} for {item} in {first} if {item} % 2 != 0]',
               '{result} = []\nfor {item} in {first}:\n    if {item} % 2 == 1:\n        {result}.append({item})\n'
               'return {result}',
           )),
    Family(('scale_list', 'multiply_each'),
           'multiplies every number in {first} by {constant} and returns the new list',
           ('numbers',), (
               'return [{item} * {constant} for {item} in {first}]',
               '{result} = []\nfor {item} in {first}:\n    {result}.append({item} * {constant})\nreturn {result}',
           )),
    Family(('shift_list', 'add_to_each'), 'adds {constant} to every number in {first} and returns the new list',
           ('numbers',), (
               'return [{item} + {constant} for {item} in {first}]',
               '{result} = []\nfor {item} in {first}:\n    {result}.append({item} + {constant})\nreturn {result}',
           )),
    Family(('square_list', 'squares_of'), 'returns a list with the square of each number in {first}',
           ('numbers',), (
               'return [{item} ** 2 for {item} in {first}]',
               'return [{item} * {item} for {item} in {first}]',
               '{result} = []\nfor {item} in {first}:\n    {result}.append({item} ** 2)\nreturn {result}',
           )),
    Family(('largest', 'find_max'), 'returns the largest number in {first}',
           ('numbers',), (
               'return max({first})',
               '{result} = {first}[0]\nfor {item} in {first}:\n    if {item} > {result}:\n        {result} = {item}\n'
               'return {result}',
           )),
    Family(('smallest', 'find_min'), 'returns the smallest number in {first}',
           ('numbers',), (
               'return min({first})',
               '{result} = {first}[0]\nfor {item} in {first}:\n    if {item} < {result}:\n        {result} = {item}\n'
               'return {result}',
           )),
    Family(('value_range', 'spread'), 'returns the difference between the largest and the smallest number in {first}',
           ('numbers',), ('return max({first}) - min({first})',)),
    Family(('index_of_max', 'argmax'), 'returns the index of the first largest number in {first}',
           ('numbers',), (
               'return {first}.index(max({first}))',
               '{result} = 0\nfor {index} in range(len({first})):\n    if {first}[{index}] > {first}[{result}]:\n'
               '        {result} = {index}\nreturn {result}',
           )),
    Family(('reverse_list', 'reversed_copy'), 'returns {first} in reversed order',
           ('numbers',), (
               'return {first}[::-1]',
               'return list(reversed({first}))',
           )),
    Family(('sort_desc', 'sort_down'), 'returns the numbers of {first} sorted from largest to smallest',
           ('numbers',), (
               'return sorted({first}, reverse=True)',
               'return sorted({first})[::-1]',
           )),
    Family(('unique_sorted', 'distinct_values'), 'returns the distinct numbers of {first} in ascending order',
           ('numbers',), (
               'return sorted(set({first}))',
               '{result} = list(set({first}))\n{result}.sort()\nreturn {result}',
           )),
    Family(('remove_duplicates', 'dedupe'),
           'removes duplicates from {first} and keeps the first occurrence of each number',
           ('numbers',), (
               '{result} = []\nfor {item} in {first}:\n    if {item} not in {result}:\n'
               '        {result}.append({item})\nreturn {result}',
           )),
    Family(('running_sum', 'prefix_sums'), 'returns the list of running sums of {first}',
           ('numbers',), (
               '{result} = []\ntotal = 0\nfor {item} in {first}:\n    total += {item}\n    {result}.append(total)\n'
               'return {result}',
               'return [sum({first}[:{index} + 1]) for {index} in range(len({first}))]',
           )),
    Family(('product', 'multiply_all'), 'returns the product of all numbers in {first}',
           ('numbers',), ('{result} = 1\nfor {item} in {first}:\n    {result} *= {item}\nreturn {result}',)),
    Family(('differences', 'step_changes'), 'returns the list of differences between neighbouring numbers in {first}',
           ('numbers',), (
               'return [{first}[{index} + 1] - {first}[{index}] for {index} in range(len({first}) - 1)]',
               '{result} = []\nfor {index} in range(1, len({first})):\n'
               '    {result}.append({first}[{index}] - {first}[{index} - 1])\nreturn {result}',
           )),
    Family(('every_nth', 'take_every'), 'returns every {constant}th element of {first} starting with the first',
           ('numbers',), (
               'return {first}[::{constant}]',
               'return [{first}[{index}] for {index} in range(0, len({first}), {constant})]',
           )),
    Family(('first_n', 'take_first'), 'returns the first {constant} elements of {first}',
           ('numbers',), ('return {first}[:{constant}]',)),
    Family(('last_n', 'take_last'), 'returns the last {constant} elements of {first}',
           ('numbers',), ('return {first}[-{constant}:]',)),
    Family(('rotate_left', 'rotate'), 'moves the first {constant} elements of {first} to the end',
           ('numbers',), ('return {first}[{constant}:] + {first}[:{constant}]',)),
    Family(('clip_values', 'clamp_list'),
           'replaces every number in {first} that is greater than {constant} by {constant}',
           ('numbers',), (
               'return [min({item}, {constant}) for {item} in {first}]',
               '{result} = []\nfor {item} in {first}:\n    if {item} > {constant}:\n'
               '        {result}.append({constant})\n    else:\n        {result}.append({item})\nreturn {result}',
           )),
    Family(('average', 'mean_value'), 'returns the average of the numbers in {first}',
           ('numbers',), (
               'return sum({first}) / len({first})',
               '{result} = 0\nfor {item} in {first}:\n    {result} += {item}\nreturn {result} / len({first})',
           )),
    Family(('is_sorted', 'is_ascending'), 'checks whether {first} is sorted in ascending order',
           ('numbers',), (
               'return {first} == sorted({first})',
               'for {index} in range(len({first}) - 1):\n    if {first}[{index}] > {first}[{index} + 1]:\n'
               '        return False\nreturn True',
           )),
    Family(('has_duplicates', 'contains_repeat'), 'checks whether {first} contains any number more than once',
           ('numbers',), (
               'return len(set({first})) != len({first})',
               'return len({first}) > len(set({first}))',
           )),
    Family(('count_value', 'occurrences'), 'counts how often {second} occurs in {first}',
           ('numbers', 'small'), (
               'return {first}.count({second})',
               '{result} = 0\nfor {item} in {first}:\n    if {item} == {second}:\n        {result} += 1\n'
               'return {result}',
           )),
    Family(('add_lists', 'pairwise_sum'), 'adds the lists {first} and {second} element by element',
           ('numbers', 'numbers'), (
               'return [a + b for a, b in zip({first}, {second})]',
               '{result} = []\nfor a, b in zip({first}, {second}):\n    {result}.append(a + b)\nreturn {result}',
           )),
    Family(('dot_product', 'inner_product'), 'returns the dot product of {first} and {second}',
           ('numbers', 'numbers'), (
               'return sum(a * b for a, b in zip({first}, {second}))',
               '{result} = 0\nfor a, b in zip({first}, {second}):\n    {result} += a * b\nreturn {result}',
           )),
    Family(('common_items', 'shared_values'),
           'returns the sorted list of numbers that are in both {first} and {second}',
           ('numbers', 'numbers'), (
               'return sorted(set({first}) & set({second}))',
               'return sorted({item} for {item} in set({first}) if {item} in {second})',
           )),
    Family(('merge_sorted', 'join_sorted'), 'joins the lists {first} and {second} and sorts the result',
           ('numbers', 'numbers'), (
               'return sorted({first} + {second})',
               '{result} = {first} + {second}\n{result}.sort()\nreturn {result}',
           )),
)
