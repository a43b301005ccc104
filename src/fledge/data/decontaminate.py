"""Which rows overlap with prompts that are kept for measuring.

A row overlaps with a benchmark when one of its texts, in normalised words (`prompt_text.py`),

- **equals** a user turn of the benchmark, or **contains** one as a whole: a turn of at least four
  words anywhere in a text, a shorter one only as the whole first user turn, and only when it opens
  the benchmark's conversation; or
- **shares** `ngram` words in a row with a user turn of the benchmark. Words that come in a row in
  ten or more different turns are a template of the benchmark, such as the instruction of a task,
  and do not count here.

A character of a script without spaces counts half a word. All texts of a row are looked at, the
answers too: which of them will be made anew is decided later.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import DecontaminateSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.data.prompt_text import all_texts, content_text, fold, split_words
from fledge.data.sources import open_source
from fledge.data.word_windows import WORD_WEIGHT, WordWindows, weigh

Rule = Literal["equal", "contained", "shared"]

TEMPLATE_TURNS = 10
"""Words in a row that so many turns of benchmarks have are a template."""

_TINY_WORDS = 3
_BREAK = "\n"
"""Stands between the texts of a row; no word is like it."""

_ANY_LENGTH = 1 << 40


class Overlap(NamedTuple):
    """What a row has in common with a benchmark."""

    benchmark: str
    """Name of the benchmark's file."""

    rule: Rule
    text: str
    """The words in common, normalised."""


class _Turn(NamedTuple):
    """One user turn of a benchmark."""

    benchmark: str
    words: list[str]


class Decontaminator:
    """The user turns of all benchmark files, ready to be looked for."""

    def __init__(self, settings: DecontaminateSettings, progress: Progress) -> None:
        self.counts: dict[str, Counter[Rule]] = {}
        """Rows found by this object, by benchmark and rule."""

        self._turns: list[_Turn] = []
        self._tiny: dict[str, str] = {}
        for path in settings.against:
            self._load(path, progress)
        self._by_rare_word = self._index_whole_turns()
        vocabulary = {word for turn in self._turns for word in turn.words}
        self._windows = WordWindows(vocabulary, settings.ngram)
        self._shared = self._index_windows()

    def overlap(self, conversation: Conversation) -> str | None:
        """The name of the benchmark file that a row overlaps with."""
        found = self.find(conversation)
        return None if found is None else found.benchmark

    def find(self, conversation: Conversation) -> Overlap | None:
        """The same, with the rule and the words; counts it."""
        words: list[str] = []
        for text in all_texts(conversation):
            words += _words(text)
            words.append(_BREAK)
        found = self._find_tiny(conversation) or self._find_whole(words) or self._find_shared(words)
        if found is not None:
            self.counts[found.benchmark][found.rule] += 1
        return found

    def _load(self, path: str, progress: Progress) -> None:
        source = SourceSettings(name="benchmark", path=(path,), licence="for measuring")
        reader = open_source(
            source, on_bad_row="stop", max_turn_chars=_ANY_LENGTH, progress=progress
        )
        known = {tuple(turn.words) for turn in self._turns}
        num_turns = 0
        for conversation in reader:
            users = [one for one in conversation.messages if one["role"] == "user"]
            for number, message in enumerate(users):
                num_turns += 1
                self._add(conversation.origin.file, _words(content_text(message)), number, known)
        if not num_turns:
            raise ConfigError(f"no user turn in the benchmark {path}; nothing to compare with.")

    def _add(
        self, benchmark: str, words: list[str], number: int, known: set[tuple[str, ...]]
    ) -> None:
        self.counts.setdefault(benchmark, Counter())
        if weigh(words) > _TINY_WORDS * WORD_WEIGHT:
            if tuple(words) not in known:
                known.add(tuple(words))
                self._turns.append(_Turn(benchmark, words))
        elif words and number == 0:
            self._tiny.setdefault(" ".join(words), benchmark)

    def _index_whole_turns(self) -> dict[str, list[tuple[_Turn, int]]]:
        """Turns by their rarest word, with the place of that word: whoever contains the turn
        contains the word."""
        num_turns: Counter[str] = Counter()
        for turn in self._turns:
            num_turns.update(set(turn.words))
        found: defaultdict[str, list[tuple[_Turn, int]]] = defaultdict(list)
        for turn in self._turns:
            rarest = min(turn.words, key=lambda word: (num_turns[word], -len(word), word))
            found[rarest].append((turn, turn.words.index(rarest)))
        return dict(found)

    def _index_windows(self) -> dict[int, str]:
        """The benchmark of every window that is not a template."""
        num_turns: Counter[int] = Counter()
        benchmarks: dict[int, str] = {}
        for turn in self._turns:
            for hashed in set(self._windows.hashes(turn.words).tolist()):
                num_turns[hashed] += 1
                benchmarks.setdefault(hashed, turn.benchmark)
        shared = {
            hashed: benchmark
            for hashed, benchmark in benchmarks.items()
            if num_turns[hashed] < TEMPLATE_TURNS
        }
        self._windows.watch(list(shared))
        return shared

    def _find_tiny(self, conversation: Conversation) -> Overlap | None:
        if not self._tiny:
            return None
        for message in conversation.messages:
            if message["role"] == "user":
                text = " ".join(_words(content_text(message)))
                benchmark = self._tiny.get(text)
                return None if benchmark is None else Overlap(benchmark, "equal", text)
        return None

    def _find_whole(self, words: Sequence[str]) -> Overlap | None:
        if self._by_rare_word.keys().isdisjoint(words):
            return None
        for place, word in enumerate(words):
            for turn, offset in self._by_rare_word.get(word, ()):
                start, end = place - offset, place - offset + len(turn.words)
                if start >= 0 and words[start:end] == turn.words:
                    is_equal = words[end] == _BREAK and (start == 0 or words[start - 1] == _BREAK)
                    rule: Rule = "equal" if is_equal else "contained"
                    return Overlap(turn.benchmark, rule, " ".join(turn.words))
        return None

    def _find_shared(self, words: Sequence[str]) -> Overlap | None:
        for hashed, start in self._windows.find(words):
            benchmark = self._shared.get(hashed)
            if benchmark is not None:
                text = " ".join(words[start : self._windows.end(words, start)])
                return Overlap(benchmark, "shared", text)
        return None


def _words(text: str) -> list[str]:
    return split_words(fold(text))
