"""Word lists of the synthetic tasks. Their order decides which word a draw gives: append, never reorder."""


def _words(text: str) -> list[str]:
    return text.split()


# Name, subject pronoun, possessive.
PEOPLE = tuple((name, 'she', 'her') if woman else (name, 'he', 'his') for name, woman in (
    ('Mia', True), ('Liam', False), ('Ava', True), ('Noah', False), ('Zoe', True), ('Omar', False), ('Ivy', True),
    ('Ravi', False), ('Lena', True), ('Hugo', False), ('Nina', True), ('Carlos', False), ('Emma', True),
    ('Jack', False), ('Priya', True), ('Tom', False), ('Sara', True), ('Ben', False), ('Grace', True), ('Leo', False),
    ('Chloe', True), ('Max', False), ('Yuki', True), ('Ali', False), ('Rosa', True), ('Paul', False), ('Jill', True),
    ('Sam', False), ('Anna', True), ('Dan', False), ('Maya', True), ('Erik', False), ('Lucy', True), ('Ken', False),
    ('Tara', True), ('Adam', False), ('Kate', True), ('Felix', False), ('Julia', True), ('Peter', False)))
ITEMS = _words('apples pears marbles stickers pencils books coins cards shells stamps cookies muffins oranges beads '
               'balloons buttons candles crayons photos puzzles ribbons roses seeds toys tickets bottles cups magnets '
               'stones badges postcards notebooks peaches plums lemons eggs bricks bolts keys maps')
PLACES = _words('market shop garden library school park museum bakery farm station beach office kitchen attic harbor '
                'workshop')
CONTAINERS = _words('boxes bags packs baskets jars crates trays bundles')
VARIABLES = list('xyzntkmpw')

TOPICS = _words('rivers mountains coffee robots bicycles music gardens chess trains planets bridges painting sleep '
                'winter computers dogs cats libraries oceans bread cities forests history clocks kites maps volcanoes '
                'tea soccer whales honey lamps paper islands deserts cooking markets windows schools ships')
ADJECTIVES = _words('quiet bright old useful simple strange large small common rare popular gentle modern ancient '
                    'careful busy famous clean hidden warm')
NOUNS = _words('people children travelers students experts families workers artists friends visitors teachers farmers '
               'writers engineers doctors')
VERBS = _words('enjoy study admire protect need remember share describe visit understand follow build discuss')
REASONS = ('because they are useful', 'in every season', 'all over the world', 'with great care', 'after a long day',
           'for many years', 'when time is short', 'without much effort', 'in small groups', 'to learn something new',
           'before the sun rises', 'despite the cost')
KEYWORDS = _words('energy future balance color signal engine shadow pattern market silver bridge story summer network '
                  'method')
SHORT_WORDS = _words('level apple river stone cloud radar tiger noon paper green light music ocean table civic bread')
NUMBER_WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten')
