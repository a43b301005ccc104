"""Words beside a number that say what it is.

Looking for words is most of the work in texts full of numbers, so it is done with sets and
`startswith` over the few words around a candidate; regular expressions of so many words are slower.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

_LETTER = "[a-z\u00c0-\u024f\u0370-\u052f]"
_FIRST_UNSPACED = "\u0e00"
"""Scripts from here on are written without spaces: their words are looked for anywhere."""

_LEN_BEFORE = 48
_LEN_AFTER = 24
_LEN_KEY = 3
_LONGEST = 32
_WORD_START = re.compile(rf"(?<!{_LETTER})[^\W\d_]")
_WORD = re.compile(rf"{_LETTER}+")
_NEXT_THING = re.compile(r"[,;|\n。，、]")


class Words:
    """A list such as `phone|cell$|电话`: beginnings of words, whole words with `$`."""

    def __init__(self, words: str) -> None:
        entries = words.split("|")
        spaced = [entry for entry in entries if entry[0] < _FIRST_UNSPACED]
        self.whole = frozenset(entry[:-1] for entry in spaced if entry.endswith("$"))
        self.beginnings = tuple(entry for entry in spaced if not entry.endswith("$"))
        self.keys = frozenset(entry[:_LEN_KEY] for entry in self.beginnings)
        self.unspaced = tuple(entry for entry in entries if entry[0] >= _FIRST_UNSPACED)
        assert all(len(entry) >= _LEN_KEY for entry in self.beginnings), words

    def last_start(self, text: str) -> int | None:
        """Where the last of these words begins."""
        starts = [
            match.start()
            for match in _WORD_START.finditer(text)
            if text.startswith(self.beginnings, match.start())
            or ((word := _WORD.match(text, match.start())) and word[0] in self.whole)
        ]
        starts += [at for entry in self.unspaced if (at := text.rfind(entry)) >= 0]
        return max(starts, default=None)


class Around:
    """What stands beside a candidate, in lower case."""

    def __init__(self, text: str, start: int, end: int) -> None:
        before = text[max(0, start - _LEN_BEFORE) : start].lower()
        line = before.rfind("\n") + 1
        # The line above speaks only of what comes first on its own line: "Phone:\n555-0143".
        self.before = before[line:] if line and _WORD_START.search(before, line) else before
        # What follows a comma or a line's end speaks of the next thing.
        self.after = _NEXT_THING.split(text[end : end + _LEN_AFTER], maxsplit=1)[0].lower()

    @cached_property
    def _both(self) -> str:
        return f"{self.before}\n{self.after}"

    @cached_property
    def _starts(self) -> list[str]:
        both = self._both
        return [both[m.start() : m.start() + _LONGEST] for m in _WORD_START.finditer(both)]

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(_WORD.findall(self._both))

    @cached_property
    def _is_ascii(self) -> bool:
        return self._both.isascii()

    def entries_said(self, index: "WordIndex") -> set[int]:
        """Which of the indexed lists have one of their words here."""
        said: set[int] = set()
        for start in self._starts:
            for beginning, entry in index.beginnings.get(start[:_LEN_KEY], ()):
                if start.startswith(beginning):
                    said.add(entry)
        for word in self._whole & index.whole.keys():
            said.update(index.whole[word])
        if not self._is_ascii:
            said.update(entry for word, entry in index.unspaced if word in self._both)
        return said

    def says(self, words: Words) -> bool:
        """One of the words is there."""
        keys, beginnings = words.keys, words.beginnings
        for start in self._starts:
            if start[:_LEN_KEY] in keys and start.startswith(beginnings):
                return True
        if words.whole and not words.whole.isdisjoint(self._whole):
            return True
        return not self._is_ascii and any(entry in self._both for entry in words.unspaced)

    def says_last(self, words: Words, other_words: Words) -> bool:
        """One of the words is there, and none of the others is nearer before the candidate."""
        place = words.last_start(self.before)
        other_place = other_words.last_start(self.before)
        if place is None:
            return other_place is None and self.says(words)
        return other_place is None or other_place <= place


class WordIndex:
    """Many lists of words, to be looked for at once."""

    def __init__(self, lists: Sequence[Words]) -> None:
        self.beginnings: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        self.whole: defaultdict[str, list[int]] = defaultdict(list)
        self.unspaced = [(word, i) for i, words in enumerate(lists) for word in words.unspaced]
        for i, words in enumerate(lists):
            for beginning in words.beginnings:
                self.beginnings[beginning[:_LEN_KEY]].append((beginning, i))
            for word in words.whole:
                self.whole[word].append(i)
