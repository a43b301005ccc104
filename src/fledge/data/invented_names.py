"""First names that nobody has: a head that has learned to copy them copies names it never saw.

Common names are single tokens of most vocabularies, and a draft of one is a guess among few. These
are two or three syllables, which tokenizers cut into pieces that only the question tells.
"""

from collections.abc import Container
from random import Random

_BEGINNINGS, _VOWELS, _MIDDLES, _ENDINGS = (
    sounds.split()
    for sounds in (
        "B Br C Ch D Dr El F Fl G Gr H Il J K Kr L M N Or P Pr Qu R S Sh St T Th Tr Um V W Y Z",
        "a e i o u ai ee ia ie oa",
        "b d l ll m n nd nn r rl rr s ss t tt v z",
        "a ah an as e el en ena er ette i ick ika in ina is o on or us wyn y yn",
    )
)
_LONG_SHARE = 0.3


def invent_name(dice: Random, taken: Container[str]) -> str:
    """A name that is not taken."""
    while True:
        parts = [dice.choice(_BEGINNINGS), dice.choice(_VOWELS), dice.choice(_MIDDLES)]
        if dice.random() < _LONG_SHARE:
            parts += [dice.choice(_VOWELS), dice.choice(_MIDDLES)]
        name = "".join([*parts, dice.choice(_ENDINGS)])
        if name not in taken:
            return name
