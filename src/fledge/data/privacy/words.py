"""Words beside a number that say what it is."""

import re
from typing import NamedTuple

LETTER = "[a-z\u00c0-\u024f\u0370-\u052f]"
"""A letter of the scripts whose words are told apart by spaces, in lower case."""

_LEN_BEFORE = 48
_LEN_AFTER = 24
_NEXT_THING = re.compile(r"[,;|\n。，、]")


def any_word(words: str) -> re.Pattern[str]:
    """Finds any of these in lower-case text: `phone|cell$|电话`.

    They match where a word begins, in scripts without spaces anywhere; `$` asks for the word's end.
    """
    spaced: list[str] = []
    unspaced: list[str] = []
    for word in words.split("|"):
        pattern = re.escape(word.rstrip("$")) + (f"(?!{LETTER})" if word.endswith("$") else "")
        is_spaced = word[0] < "\u0e00"
        (spaced if is_spaced else unspaced).append(pattern)
    parts = [rf"(?<!{LETTER})(?:{'|'.join(spaced)})"] if spaced else []
    return re.compile("|".join(parts + unspaced))


class Around(NamedTuple):
    """What stands beside a candidate, in lower case."""

    before: str
    after: str

    def says(self, words: re.Pattern[str]) -> bool:
        """One of the words is there."""
        return (words.search(self.before) or words.search(self.after)) is not None

    def says_last(self, words: re.Pattern[str], other_words: re.Pattern[str]) -> bool:
        """One of the words is there, and none of the others is nearer before the candidate."""
        end = _end_of_last(words, self.before)
        if end is None:
            return words.search(self.after) is not None and not other_words.search(self.before)
        return (_end_of_last(other_words, self.before) or 0) <= end


def look_around(text: str, start: int, end: int) -> Around:
    """What stands beside characters `start` to `end`."""
    before = text[max(0, start - _LEN_BEFORE) : start]
    # What follows a comma or a line's end speaks of the next thing.
    after = _NEXT_THING.split(text[end : end + _LEN_AFTER], maxsplit=1)[0]
    return Around(before.lower(), after.lower())


def _end_of_last(words: re.Pattern[str], text: str) -> int | None:
    end = None
    for match in words.finditer(text):
        end = match.end()
    return end
