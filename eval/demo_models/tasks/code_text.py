"""Python functions over strings, lists of strings, nested lists and dictionaries."""
from .code_family import Family

TEXT_FAMILIES = (
    Family(('reverse_string', 'backwards'), 'returns the string {first} reversed',
           ('text',), (
               'return {first}[::-1]',
               "return ''.join(reversed({first}))",
               "{result} = ''\nfor {item} in {first}:\n    {result} = {item} + {result}\nreturn {result}",
           )),
    Family(('is_palindrome', 'check_palindrome'), 'checks whether the string {first} is a palindrome',
           ('text',), (
               'return {first} == {first}[::-1]',
               'for {index} in range(len({first}) // 2):\n    if {first}[{index}] != {first}[-{index} - 1]:\n'
               '        return False\nreturn True',
           )),
    Family(('count_vowels', 'num_vowels'), 'counts the vowels in the string {first}',
           ('text',), (
               "return sum(1 for {item} in {first} if {item} in 'aeiou')",
               "{result} = 0\nfor {item} in {first}:\n    if {item} in 'aeiou':\n        {result} += 1\n"
               'return {result}',
           )),
    Family(('remove_vowels', 'strip_vowels'), 'returns the string {first} without its vowels',
           ('text',), (
               "return ''.join({item} for {item} in {first} if {item} not in 'aeiou')",
               "{result} = ''\nfor {item} in {first}:\n    if {item} not in 'aeiou':\n        {result} += {item}\n"
               'return {result}',
           )),
    Family(('count_char', 'count_letter'), 'counts how often the letter {letter} occurs in the string {first}',
           ('text',), (
               "return {first}.count('{letter}')",
               "{result} = 0\nfor {item} in {first}:\n    if {item} == '{letter}':\n        {result} += 1\n"
               'return {result}',
           )),
    Family(('replace_char', 'swap_letter'), 'replaces every letter {letter} in {first} by a dash',
           ('text',), (
               "return {first}.replace('{letter}', '-')",
               "return ''.join('-' if {item} == '{letter}' else {item} for {item} in {first})",
           )),
    Family(('repeat_string', 'repeat'), 'repeats the string {first} {constant} times',
           ('text',), ('return {first} * {constant}',)),
    Family(('word_count', 'count_words'), 'returns the number of words in the string {first}',
           ('text',), ('return len({first}.split())',)),
    Family(('longest_word', 'find_longest'), 'returns the first longest word of the string {first}',
           ('text',), (
               'return max({first}.split(), key=len)',
               "{result} = ''\nfor {item} in {first}.split():\n    if len({item}) > len({result}):\n"
               '        {result} = {item}\nreturn {result}',
           )),
    Family(('reverse_words', 'flip_words'), 'reverses the order of the words in the string {first}',
           ('text',), (
               "return ' '.join({first}.split()[::-1])",
               "return ' '.join(reversed({first}.split()))",
           )),
    Family(('capitalize_words', 'title_words'), 'capitalizes every word of the string {first}',
           ('text',), ("return ' '.join({item}.capitalize() for {item} in {first}.split())",)),
    Family(('char_counts', 'letter_counts'),
           'returns a dictionary that maps each character of {first} to its number of occurrences',
           ('text',), (
               '{result} = {{}}\nfor {item} in {first}:\n    {result}[{item}] = {result}.get({item}, 0) + 1\n'
               'return {result}',
               '{result} = {{}}\nfor {item} in {first}:\n    if {item} in {result}:\n        {result}[{item}] += 1\n'
               '    else:\n        {result}[{item}] = 1\nreturn {result}',
           )),
    Family(('to_upper', 'shout'), 'returns the string {first} in upper case',
           ('text',), ('return {first}.upper()',)),
    Family(('first_letters', 'acronym'), 'returns the first letters of the words in {first} as one string',
           ('text',), (
               "return ''.join({item}[0] for {item} in {first}.split())",
               "{result} = ''\nfor {item} in {first}.split():\n    {result} += {item}[0]\nreturn {result}",
           )),
    Family(('string_lengths', 'word_lengths'), 'returns a list with the length of each string in {first}',
           ('texts',), (
               'return [len({item}) for {item} in {first}]',
               'return list(map(len, {first}))',
               '{result} = []\nfor {item} in {first}:\n    {result}.append(len({item}))\nreturn {result}',
           )),
    Family(('long_words', 'filter_long'), 'returns the strings in {first} that have more than {constant} characters',
           ('texts',), (
               'return [{item} for {item} in {first} if len({item}) > {constant}]',
               '{result} = []\nfor {item} in {first}:\n    if len({item}) > {constant}:\n'
               '        {result}.append({item})\nreturn {result}',
           )),
    Family(('join_strings', 'concat_all'), 'joins the strings in {first} with a comma',
           ('texts',), ("return ','.join({first})",)),
    Family(('sort_by_length', 'order_by_size'), 'sorts the strings in {first} by their length',
           ('texts',), (
               'return sorted({first}, key=len)',
               '{result} = list({first})\n{result}.sort(key=len)\nreturn {result}',
           )),
    Family(('starts_with', 'words_with'), 'returns the strings in {first} that start with the letter {letter}',
           ('texts',), (
               "return [{item} for {item} in {first} if {item}.startswith('{letter}')]",
               "return [{item} for {item} in {first} if {item}[0] == '{letter}']",
           )),
    Family(('index_words', 'position_map'), 'returns a dictionary that maps each string in {first} to its index',
           ('texts',), (
               'return {{{item}: {index} for {index}, {item} in enumerate({first})}}',
               '{result} = {{}}\nfor {index}, {item} in enumerate({first}):\n    {result}[{item}] = {index}\n'
               'return {result}',
           )),
    Family(('flatten', 'flatten_once'), 'flattens the list of lists {first} into one list',
           ('rows',), (
               'return [{item} for row in {first} for {item} in row]',
               '{result} = []\nfor row in {first}:\n    {result}.extend(row)\nreturn {result}',
           )),
    Family(('row_sums', 'sum_rows'), 'returns a list with the sum of each inner list of {first}',
           ('rows',), (
               'return [sum(row) for row in {first}]',
               '{result} = []\nfor row in {first}:\n    {result}.append(sum(row))\nreturn {result}',
           )),
    Family(('longest_row', 'max_length'), 'returns the length of the longest inner list of {first}',
           ('rows',), ('return max(len(row) for row in {first})',)),
    Family(('sum_values', 'dict_total'), 'returns the sum of the values of the dictionary {first}',
           ('table',), (
               'return sum({first}.values())',
               '{result} = 0\nfor {item} in {first}.values():\n    {result} += {item}\nreturn {result}',
           )),
    Family(('keys_above', 'large_keys'), 'returns the sorted keys of {first} whose value is greater than {constant}',
           ('table',), (
               'return sorted({item} for {item} in {first} if {first}[{item}] > {constant})',
               'return sorted(key for key, {item} in {first}.items() if {item} > {constant})',
           )),
    Family(('invert_dict', 'swap_keys'), 'returns a dictionary with the keys and values of {first} swapped',
           ('table',), (
               'return {{{item}: key for key, {item} in {first}.items()}}',
               '{result} = {{}}\nfor key, {item} in {first}.items():\n    {result}[{item}] = key\nreturn {result}',
           )),
    Family(('best_key', 'key_of_max'), 'returns the key of {first} with the largest value',
           ('table',), ('return max({first}, key={first}.get)',)),
)
