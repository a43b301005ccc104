"""Names and places: a plug-in tags, this policy decides.

A tagger of named entities finds Jordan in "Jordan normal form" and Paris in any question about
geography. So a tag counts only where the text is personal at that place:

    name    behind "my name is", "my wife", "Dear", "Regards,", "Patient:"; beside contact data
    place   behind "I live in", "ship to"; beside a name that counted

Texts without any such place are not tagged at all, which is most of them. Code is never tagged.
A name that counted is replaced in all texts of its conversation (`Names.spread`).
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from fledge.data.privacy import introductions
from fledge.data.privacy.finding import Finding, resolve
from fledge.data.privacy.name_lists import COMMON_WORDS, NEVER, NOT_NAMES, TECHNICAL

_CONTACT_TYPES = frozenset(("email", "phone", "card", "iban", "national_id"))
_CONTACT_DISTANCE = 60
_ONE_WORD_DISTANCE = 12
_LOOK_BACK = 60
_SCORE = 0.8
_MIN_PART_LEN = 3

_UNSPACED = "\u2e80"
"""Scripts from here on are written without spaces."""

_ADDRESS_GOES_ON = (", ", ",\n", "\n", " ")
_SENTENCE_END = re.compile(r"[.!?]\s+[A-Z]")
_NOT_TELLING = COMMON_WORDS | NEVER
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]{1,200}`", re.DOTALL)
_FIRST_WORD = re.compile(r"([\w'’-]+)[.:,]? ")
_LETTERS = re.compile(r"[^\W\d_][\w'’-]*")


class Tag(NamedTuple):
    """Characters `start` to `end` may be the name of a person or a place."""

    type: Literal["name", "place"]
    start: int
    end: int
    score: float


class NameFinder(Protocol):
    """A plug-in that tags; it may tag too much."""

    def tag(self, text: str) -> Sequence[Tag]:
        """Names and places in a text."""


class NamePolicy:
    """Which tags of a text are somebody's name or home."""

    def __init__(self, finder: NameFinder, min_score: float) -> None:
        self._finder = finder
        self._min_score = min_score

    def find(self, text: str, others: Sequence[Finding]) -> list[Finding]:
        """Personal names and places; `others` is what was found in the text already."""
        contacts = [finding for finding in others if finding.type in _CONTACT_TYPES]
        if not contacts and not introductions.has_personal_words(text):
            return []
        prose = _CODE.sub(lambda code: " " * len(code[0]), text)
        # Taggers know English; elsewhere what stands beside contact data is anybody's guess.
        trusted = contacts if introductions.looks_english(prose) else []
        tags = self._tags(prose)
        sure = [Tag(*found, 1.0) for found in introductions.find_introduced(prose)]
        names = [
            *(tag for tag in sure if tag.type == "name" and not _has_word(prose, tag, NOT_NAMES)),
            *(tag for tag in tags if tag.type == "name" and _is_personal(prose, tag, trusted)),
            *_addressees(prose, contacts),
        ]
        homes = [
            tag for tag in sure if tag.type == "place" and not _has_word(prose, tag, TECHNICAL)
        ]
        places = [tag for tag in tags if tag.type == "place"]
        places += [Tag("place", *span, 1.0) for span in introductions.find_streets(prose)]
        homes += _homes(prose, places, names, contacts)
        found = [Finding(tag.type, tag.start, tag.end, _SCORE) for tag in (*names, *homes)]
        return _joined(text, resolve(found))

    def _tags(self, text: str) -> list[Tag]:
        """The plug-in's tags that are sure enough, without titles, and possible."""
        tags = []
        for tag in self._finder.tag(text):
            if tag.score < self._min_score:
                continue
            start = _end_of_titles(text, tag)
            named = text[start : tag.end].partition("\n")[0].rstrip(" \t.,;:!?")
            tag = tag._replace(start=start, end=start + len(named))
            if _LETTERS.search(named) and not _has_word(text, tag, NEVER):
                tags.append(tag)
        return tags


class KnownNames:
    """Names that counted somewhere in a conversation, to be replaced wherever else they are."""

    def __init__(self) -> None:
        self.full_names: dict[str, str] = {}
        """From a name and each of its parts to the name as it was first given."""

    def add(self, name: str) -> None:
        """Remember a name and the parts by which its bearer may be called."""
        name = " ".join(name.split())
        full_name = self.full_names.setdefault(name, name)
        parts = _LETTERS.findall(name)
        for part in parts if len(parts) > 1 else ():
            is_telling = part[0].isupper() and part.lower() not in _NOT_TELLING
            if len(part) >= _MIN_PART_LEN and is_telling:
                self.full_names.setdefault(part, full_name)

    def find(self, text: str) -> list[Finding]:
        """Where the names are."""
        telling = [name for name in self.full_names if name.lower() not in COMMON_WORDS]
        if not telling or not any(name in text for name in telling):
            return []
        longest_first = sorted(telling, key=lambda name: (-len(name), name))
        spaced = [re.escape(name) for name in longest_first if name[0] < _UNSPACED]
        unspaced = [re.escape(name) for name in longest_first if name[0] >= _UNSPACED]
        pattern = "|".join([*unspaced, *([rf"(?<!\w)(?:{'|'.join(spaced)})(?!\w)"] * bool(spaced))])
        return [
            Finding("name", *match.span(), _SCORE - 0.05) for match in re.finditer(pattern, text)
        ]


def _end_of_titles(text: str, tag: Tag) -> int:
    """Where the name itself begins in "Contact Mrs. Lee"."""
    start = tag.start
    while (word := _FIRST_WORD.match(text, start, tag.end)) and word[1].lower() in NOT_NAMES:
        start = word.end()
    title = introductions.TITLE.match(text, start, tag.end)
    return title.end() if title else start


def _has_word(text: str, tag: Tag, words: frozenset[str]) -> bool:
    return any(word.lower() in words for word in _LETTERS.findall(text[tag.start : tag.end]))


def _is_personal(text: str, tag: Tag, contacts: Sequence[Finding]) -> bool:
    look_back = max(0, tag.start - _LOOK_BACK)
    if introductions.NAME_BEFORE.search(text, look_back, tag.start):
        return True
    has_many_words = len(_LETTERS.findall(text[tag.start : tag.end])) > 1
    if has_many_words and introductions.WEAK_NAME_BEFORE.search(text, look_back, tag.start):
        return True
    for contact in contacts:
        between = text[min(tag.end, contact.end) : max(tag.start, contact.start)]
        is_direct = not any(character.isalnum() for character in between)
        if _is_beside(text, tag, contact.start, contact.end) and (has_many_words or is_direct):
            return True
    return False


def _is_beside(text: str, tag: Tag, start: int, end: int) -> bool:
    """Not far apart, without an empty line or the end of a sentence between them."""
    between = text[min(tag.end, end) : max(tag.start, start)]
    is_near = len(between) <= _CONTACT_DISTANCE
    return is_near and "\n\n" not in between and not _SENTENCE_END.search(between)


def _addressees(text: str, contacts: Sequence[Finding]) -> list[Tag]:
    tags = [Tag("name", *span, 1.0) for span in introductions.find_addressees(text)]
    return [
        tag
        for tag in tags
        if not _has_word(text, tag, NEVER)
        and any(0 <= contact.start - tag.end <= _ONE_WORD_DISTANCE for contact in contacts)
    ]


def _homes(
    text: str, places: Sequence[Tag], names: Sequence[Tag], contacts: Sequence[Finding]
) -> list[Tag]:
    homes: list[Tag] = []
    for place in sorted(places, key=lambda tag: tag.start):
        look_back = max(0, place.start - _LOOK_BACK)
        is_street = any(character.isdigit() for character in text[place.start : place.end])
        if (
            introductions.HOME_BEFORE.search(text, look_back, place.start)
            or any(_comes_from(text, name, place) for name in names)
            or any(_goes_on(text, home, place) for home in homes)
            or (
                is_street
                and any(
                    _is_beside(text, place, start, end) for _, start, end, _ in (*names, *contacts)
                )
            )
        ):
            homes.append(place)
    return homes


def _comes_from(text: str, name: Tag, place: Tag) -> bool:
    between = text[name.end : place.start]
    return introductions.FROM.match(between) is not None if name.end <= place.start else False


def _goes_on(text: str, home: Tag, place: Tag) -> bool:
    """The rest of an address, or where they moved to next."""
    if home.end > place.start:
        return False
    between = text[home.end : place.start]
    return between in _ADDRESS_GOES_ON or introductions.MOVED_ON.match(between) is not None


def _joined(text: str, findings: Sequence[Finding]) -> list[Finding]:
    """Parts of one address as one finding."""
    joined: list[Finding] = []
    for finding in findings:
        last = joined[-1] if joined else None
        is_place = last is not None and last.type == finding.type == "place"
        if last and is_place and text[last.end : finding.start] in _ADDRESS_GOES_ON:
            joined[-1] = last._replace(end=finding.end)
        else:
            joined.append(finding)
    return joined
