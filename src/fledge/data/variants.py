"""Variants of a prompt: the same question with other numbers, first names and things.

A number becomes another one of about the same size and of the same form, as round as it was: 48 an
even number of two digits, `$1,250` a multiple of 50 with its comma, `3.50` a price with two
decimals. The same number becomes the same one wherever it stands in a prompt, and different ones
stay different. 0, 1, years, dates, ordinals, fractions, times and what is part of a word stay as
they are. So do numbers in words.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fledge.contracts.conversation import Conversation, Message, variant_id
from fledge.data.invented_names import invent_name
from fledge.data.things import SwappedThings

_NUMBER = re.compile(
    r"(?<![\w.])(?<![0-9][/:])(?<![A-Za-z]-)"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.(?P<decimals>[0-9]+))?"
    r"(?![\w]|[/:.][0-9]|,[0-9]{3}(?![0-9]))"
)
_PERCENT = re.compile(r"\s?(?:%|percent\b)")
_TIME = re.compile(r"\s?(?:[ap]\.?m\b|o'clock\b)", re.IGNORECASE)
_MONTH = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
    r"(?:uary|ruary|ch|il|e|y|ust|t|tember|ober|ember)?\.?\s$"
)
_YEAR, _DAY = re.compile(r"[0-9]{4}-$"), re.compile(r"[0-9]{4}-[0-9]{2}-$")
_YEARS = range(1900, 2100)
_MAX_DIGITS = 12
"""Longer ones are no quantities."""

_MIN_CHOICE = 4
"""Numbers to choose from; a number is replaced by less round ones where there are fewer."""

_TRIES = 20

_NAMES = tuple(
    tuple(names.split())
    for names in (
        """Adriana Alexis Alice Allison Alyssa Amanda Amelia Amy Angela Ann Anna Anne Annie
        Ashley Barbara Becky Bella Beth Betty Bonnie Brenda Brooke Cara Carla Carly
        Caroline Carolyn Carrie Cathy Charlotte Cheryl Chloe Cindy Claire Clara Dana
        Danielle Debbie Diana Diane Donna Dorothy Ella Elsa Emily Emma Erica Erin Fiona
        Gina Greta Hailey Haley Hannah Heather Helen Isabella Jane Janet Janice Jasmine
        Jean Jen Jenna Jennifer Jenny Jess Jessica Joan Joyce Julia Julie Karen Kate Kathy
        Katie Katy Kayla Kelly Kelsey Kendra Kim Kylie Lana Laura Lauren Layla Leila Lily
        Linda Lisa Lola Louise Lucy Luna Lydia Madeline Maggie Mandy Mara Marcy Margaret
        Maria Marie Marla Martha Martina Mary Maya Megan Melanie Melissa Mia Michelle Milly
        Molly Monica Nadia Nancy Natalia Natalie Nicole Nora Olivia Pam Patty Paula Peggy
        Polly Rachel Rebecca Rita Ruth Sally Samantha Sandra Sara Sarah Sasha Shelby Shelly
        Sophia Stacy Stella Stephanie Sue Susan Susie Tabitha Tanya Tara Theresa Tiffany
        Tina Tracy Valerie Vanessa Veronica Violet Wendy Zoe""",
        """Aaron Adam Ahmed Alan Albert Alex Alexander Andrew Andy Anthony Arthur Barry Ben
        Benjamin Bert Bill Billy Blake Bob Bobby Brad Brandon Brian Bruce Bryan Caleb
        Calvin Cameron Carl Carlos Carter Casey Charles Charlie Chris Christopher Colin
        Connor Dan Daniel Danny Dave David Dean Dennis Derek Devin Dexter Diego Edward Eric
        Ethan Felix Frank Fred Freddy Gabriel Gary George Gerald Grayson Greg Hank Hans
        Harry Hector Henry Hugo Ian Isaac Ivan Jack Jackson Jacob Jake James Jared Jason
        Jayden Jed Jeff Jeremy Jerome Jerry Jesse Jim Jimmy Joe Joel Joey John Johnny Jonah
        Jonathan Jose Joseph Josh Juan Jude Julian Justin Keith Ken Kenneth Kenny Kevin
        Kyle Larry Leo Liam Lou Lucas Luke Manny Marco Marcus Mario Mark Martin Mason Mateo
        Matt Michael Mike Miles Mitchell Nathan Neil Nicholas Nick Noah Oliver Omar Oscar
        Pablo Patrick Paul Pete Peter Phil Philip Raj Ralph Randy Ray Raymond Ricardo
        Richard Rick Rob Robbie Robert Roberto Roger Ron Ryan Sam Sammy Samuel Scott Sean
        Shane Simon Stan Steve Steven Ted Terrence Theo Thomas Tim Timothy Todd Tom Tommy
        Tony Travis Trevor Tyler Victor Vincent Walter Wayne William Zach""",
    )
)
_INVENTED_SHARE = 1 / 3
_KINDS = {name: kind for kind, names in enumerate(_NAMES) for name in names}
_NAME = re.compile(rf"\b(?:{'|'.join(_KINDS)})\b")


def make_variants(row: Conversation, count: int, seed: int) -> list[Conversation]:
    """At most `count` variants of what opens a conversation, no two of them alike.

    What follows the first answer is left out, since that answer would not fit. There are fewer
    where there are not as many other numbers, and none for a row without any.
    """
    opening = _opening(row.messages)
    texts = [message["content"] for message in opening if message["role"] == "user"]
    known, variants = {tuple(texts)}, []
    for number in range(1, count + 1):
        for attempt in range(_TRIES):
            swaps = _Swaps(texts, random.Random(f"{seed}:{row.id}:{number}:{attempt}"))
            changed = tuple(map(swaps.apply, texts))
            if swaps.has_numbers and changed not in known:
                known.add(changed)
                messages = _with_texts(opening, changed)
                variants.append(replace(row, id=variant_id(row.id, number), messages=messages))
                break
    return variants


def _opening(messages: Sequence[Message]) -> list[Message]:
    roles = [message["role"] for message in messages]
    return list(messages[: roles.index("assistant")] if "assistant" in roles else messages)


def _with_texts(opening: Iterable[Message], texts: Iterable[str]) -> tuple[Message, ...]:
    left = iter(texts)
    return tuple(
        {**message, "content": next(left)} if message["role"] == "user" else message
        for message in opening
    )


class _Swaps:
    """What stands for what in one variant."""

    def __init__(self, texts: Sequence[str], dice: random.Random) -> None:
        self._dice = dice
        found = [match for text in texts for match in _NUMBER.finditer(text)]
        self._taken = {_plain(match) for match in found}
        self._shares = {_plain(match) for match in found if _PERCENT.match(*_behind(match))}
        self._numbers: dict[str, str] = {}
        for match in found:
            if _plain(match) not in self._numbers and not _stays(match):
                self._choose_number(match)
        names = {match[0] for text in texts for match in _NAME.finditer(text)}
        self._names = self._choose_names(sorted(names))
        self._things = SwappedThings(texts, dice)

    @property
    def has_numbers(self) -> bool:
        """Whether any number is another one now."""
        return bool(self._numbers)

    def apply(self, text: str) -> str:
        changed = _NUMBER.sub(self._number, text)
        return self._things.apply(_NAME.sub(lambda match: self._names[match[0]], changed))

    def _number(self, match: re.Match[str]) -> str:
        found = self._numbers.get(_plain(match))
        if found is None or _stays(match):
            return match[0]
        whole, point, decimals = found.partition(".")
        return (f"{int(whole):,}" if "," in match["whole"] else whole) + point + decimals

    def _choose_number(self, match: re.Match[str]) -> None:
        """Remember what this number becomes; nothing where there is no other like it."""
        plain, decimals = _plain(match), match["decimals"] or ""
        value = int(plain.replace(".", ""))
        most = 100 * 10 ** len(decimals) - 1 if plain in self._shares else None
        choices = _numbers_like(value, most=most)
        for _ in range(_TRIES if choices else 0):
            chosen = self._dice.choice(choices)
            if decimals and chosen % 10 == 0 and value % 10:
                continue  # 2.0 is no number that people write
            digits = str(chosen).zfill(len(plain.replace(".", "")))
            text = f"{digits[: -len(decimals)]}.{digits[-len(decimals) :]}" if decimals else digits
            if text not in self._taken:
                self._taken.add(text)
                self._numbers[plain] = text
                return

    def _choose_names(self, names: Sequence[str]) -> Mapping[str, str]:
        """Another name for each: one of the same kind, so that `he` and `she` still fit, or one
        that fits both because nobody has it."""
        chosen: dict[str, str] = {}
        for name in names:
            taken = {*names, *chosen.values()}
            left = [one for one in _NAMES[_KINDS[name]] if one not in taken]
            if not left or self._dice.random() < _INVENTED_SHARE:
                chosen[name] = invent_name(self._dice, taken)
            else:
                chosen[name] = self._dice.choice(left)
        return chosen


def _plain(match: re.Match[str]) -> str:
    """A number without its commas, so that `1,000` and `1000` are the same."""
    whole = match["whole"].replace(",", "")
    return f"{whole}.{match['decimals']}" if match["decimals"] else whole


def _behind(match: re.Match[str]) -> tuple[str, int]:
    return match.string, match.end()


def _stays(match: re.Match[str]) -> bool:
    whole = match["whole"]
    if len(_plain(match)) > _MAX_DIGITS:
        return True
    if match["decimals"]:
        return not int(_plain(match).replace(".", ""))
    before = match.string[: match.start()]
    if len(whole) <= 2 and (_TIME.match(*_behind(match)) or _is_date(match, before)):
        return True
    is_year = whole.isdecimal() and int(whole) in _YEARS and not before.endswith("$")
    is_code = len(whole) > 1 and whole.startswith("0")
    return whole in ("0", "1") or is_year or is_code


def _is_date(match: re.Match[str], before: str) -> bool:
    """Whether it is a day or a month: `May 12`, `2024-05-12`."""
    behind = match.string[match.end() : match.end() + 1]
    is_day, is_month = _DAY.search(before), _YEAR.search(before) and behind == "-"
    return bool(is_day or is_month or _MONTH.search(before))


def _numbers_like(value: int, *, most: int | None) -> range:
    """Numbers of as many digits, from half of it to three times as much, as round as it is."""
    above = 10 ** len(str(value))
    low = max(-(-value // 2), above // 10, 2)
    high = min(3 * value, above - 1)
    if most is not None and value <= most + 1:
        high = min(high, most)
    zeros = len(str(value)) - len(str(value).rstrip("0"))
    step = 10**zeros * math.gcd(value // 10**zeros, 10)
    while True:
        choices = range(-(-low // step) * step, high + 1, step)
        if len(choices) > _MIN_CHOICE or step == 1:
            return choices
        step //= 5 if str(step).startswith("5") else 2
