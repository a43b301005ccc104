"""Words for things that stand for one another in a question: 18 cookies may be muffins as well.

A closed list, in kinds whose words fit the same sentences: what is eaten, what lies in a drawer,
what lives on a farm. Words that are often verbs are left out, and a word that begins with a vowel
becomes one that does too, so that `a` and `an` still fit.
"""

import re
from collections.abc import Iterable, Mapping
from random import Random

_KINDS = (
    # fruit and vegetables
    """banana pear peach/peaches mango/mangoes lemon lime melon plum grape
    strawberry/strawberries cherry/cherries blueberry/blueberries pineapple coconut kiwi
    tomato/tomatoes potato/potatoes carrot cucumber pumpkin radish/radishes turnip beet
    mushroom watermelon papaya bean nut""",
    "apple orange apricot avocado onion olive eggplant artichoke egg oyster acorn",
    # baked and sweet
    """cookie muffin cupcake brownie pastry/pastries donut doughnut croissant bagel pretzel
    waffle pancake biscuit tart pie cake candy/candies lollipop chocolate marshmallow
    jellybean gumball cracker""",
    # meals
    "sandwich/sandwiches burger hamburger taco burrito pizza hotdog salad dumpling",
    # drawer and desk
    """pencil pen crayon marker notebook book magazine comic novel sticker stapler folder ruler
    postcard stamp journal diary/diaries brush/brushes calendar poster letter photo picture
    painting card flyer ticket map""",
    "envelope eraser album atlas/atlases item object",
    # toys and small things
    """marble toy doll puzzle balloon kite bead button coin badge ribbon bracelet necklace
    keychain seashell pebble lantern candle medal puppet shell rock brick tile block ball rope
    flag feather bone petal""",
    # clothes
    """shirt sweater jacket coat scarf/scarves sock skirt glove hat dress/dresses jersey blouse
    sweatshirt hoodie vest""",
    # animals of a farm and a house
    """cow goat horse pig chicken rabbit hen turkey donkey llama lamb cat dog puppy/puppies
    kitten hamster parrot turtle lizard goldfish/goldfish duck bird frog crab""",
    # animals of the wild
    """lion tiger bear wolf/wolves giraffe zebra monkey kangaroo deer/deer fox/foxes squirrel
    penguin dolphin whale shark snake spider bee butterfly/butterflies worm""",
    # plants
    "tree bush/bushes shrub rose tulip daisy/daisies sunflower lily/lilies cactus/cacti daffodil",
    # what holds things
    """box/boxes basket bag crate carton jar bucket barrel bin backpack suitcase drawer
    shelf/shelves cabinet bottle packet package container sack tray pot bowl glass/glasses cup
    tank""",
    # furniture and appliances
    """chair table lamp desk sofa bed mirror rug curtain clock television radio computer laptop
    phone printer camera""",
    # vehicles
    "car bus/buses van bicycle motorcycle scooter tractor taxi bike",
    # people
    """student teacher player worker neighbor guest visitor tourist dancer singer customer
    employee/employees volunteer passenger camper nurse farmer baker friend girl boy kid
    patient child/children member""",
    # rooms and buildings
    """house shop school library/libraries museum hotel bakery/bakeries bank restaurant cafe
    church/churches store building apartment""",
)
_MANY, _ONE = 0, 1


def _words() -> tuple[dict[str, tuple[int, int]], list[list[tuple[str, str]]]]:
    """Where each word stands, and the pairs of each kind, plural first."""
    places: dict[str, tuple[int, int]] = {}
    kinds: list[list[tuple[str, str]]] = []
    for number, kind in enumerate(_KINDS):
        pairs: list[tuple[str, str]] = []
        for entry in dict.fromkeys(kind.split()):
            one, _, many = entry.partition("/")
            pair = (many or f"{one}s", one)
            for word in pair:
                places.setdefault(word, (number, len(pairs)))
            pairs.append(pair)
        kinds.append(pairs)
    return places, kinds


_PLACES, _PAIRS = _words()
_WORD = re.compile(
    rf"(?<![\w'-])(?:{'|'.join(sorted(_PLACES, key=len, reverse=True))})(?![\w-])", re.IGNORECASE
)


class SwappedThings:
    """Another thing of the same kind for each in some texts, the same one wherever it stands."""

    def __init__(self, texts: Iterable[str], dice: Random) -> None:
        found = {_PLACES[match[0].lower()] for text in texts for match in _WORD.finditer(text)}
        self._others: Mapping[tuple[int, int], tuple[str, str]] = self._choose(sorted(found), dice)

    @staticmethod
    def _choose(
        found: list[tuple[int, int]], dice: Random
    ) -> dict[tuple[int, int], tuple[str, str]]:
        taken = {_PAIRS[kind][place] for kind, place in found}
        chosen: dict[tuple[int, int], tuple[str, str]] = {}
        for kind, place in found:
            free = [pair for pair in _PAIRS[kind] if pair not in taken]
            if free:
                chosen[kind, place] = dice.choice(free)
                taken.add(chosen[kind, place])
        return chosen

    def apply(self, text: str) -> str:
        return _WORD.sub(self._other, text)

    def _other(self, match: re.Match[str]) -> str:
        word = match[0].lower()
        place = _PLACES[word]
        if place not in self._others:
            return match[0]
        is_many = word == _PAIRS[place[0]][place[1]][_MANY]
        other = self._others[place][_MANY if is_many else _ONE]
        if match[0].isupper() and len(word) > 1:
            return other.upper()
        return other.capitalize() if match[0][0].isupper() else other
