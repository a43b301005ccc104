"""Which texts a target wrote can stand as a user's prompt, and how much they vary."""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fledge.data.prompt_text import fold, split_words
from fledge.data.word_windows import WORD_WEIGHT, weigh

Flaw = Literal[
    "empty", "cut off", "short", "long", "repeats", "script", "debris", "answer", "known"
]

_MIN_WORDS = 3
_MAX_WORDS = 1000
_MAX_SAME_WORDS = 4
_MAX_SAME_CHARACTERS = 24
_MAX_REPEATED_SHARE = 0.25
_MIN_TRIGRAMS = 12
_MIN_SCRIPT_SHARE = 0.9
_MEASURED_ROWS = 20_000
_SEGMENT_WORDS = 1000

_ANSWER_STARTS = tuple(
    fold(start)
    for start in (
        "Sure,",
        "Sure!",
        "Sure thing",
        "Certainly",
        "Of course",
        "Absolutely!",
        "As an AI",
        "As a language model",
        "I'm sorry, but",
        "I am sorry, but",
        "I apologize",
        "I'm here to help",
        "I am here to help",
        "I'd be happy to help",
        "I'd be glad to help",
        "I would be happy to help",
        "How can I help you",
        "How can I assist you",
        "How may I help you",
        "How may I assist you",
        "What can I help you with",
        "Thank you for your question",
        "That's a great question",
        "Great question",
        "Answer:",
        "Assistant:",
        "¡Claro",
        "Claro,",
        "Por supuesto",
        "Bien sûr",
        "Natürlich",
        "Gerne",
        "Certamente",
        "Com certeza",
        "Конечно",
        "当然",
        "好的，",
        "もちろん",
        "물론",
        "بالتأكيد",
        "ज़रूर",
    )
)


def find_flaw(text: str, *, marks: Iterable[str], scripts: Sequence[str] | None) -> Flaw | None:
    """What keeps a text from being a prompt; None when nothing does.

    `marks` are texts that no user writes. `scripts` name the letters of the language that was asked
    for; Latin ones are always fine, since small targets fall back to English.
    """
    if not text.strip():
        return "empty"
    if any(mark in text for mark in marks) or any(map(_is_debris, set(text))):
        return "debris"
    words = split_words(fold(text))
    weight = weigh(words)
    if weight < _MIN_WORDS * WORD_WEIGHT:
        return "short"
    if weight > _MAX_WORDS * WORD_WEIGHT:
        return "long"
    if fold(text).lstrip("\"'*# ").replace("\u2019", "'").startswith(_ANSWER_STARTS):
        return "answer"
    if _repeats(text, words):
        return "repeats"
    if scripts is not None and not _is_written_in(text, scripts):
        return "script"
    return None


def _is_debris(character: str) -> bool:
    """Broken characters, control codes, code points without a meaning."""
    if character in "\n\t\r":
        return False
    return character == "\ufffd" or unicodedata.category(character) in ("Cc", "Co", "Cs", "Cn")


def _repeats(text: str, words: Sequence[str]) -> bool:
    if _longest_run(words) > _MAX_SAME_WORDS or _longest_run(text) > _MAX_SAME_CHARACTERS:
        return True
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    repeated = len(trigrams) - len(set(trigrams))
    return len(trigrams) >= _MIN_TRIGRAMS and repeated > _MAX_REPEATED_SHARE * len(trigrams)


def _longest_run(items: Iterable[str]) -> int:
    return max((sum(1 for _ in run) for _, run in itertools.groupby(items)), default=0)


def _is_written_in(text: str, scripts: Sequence[str]) -> bool:
    """Whether nearly all letters are of these scripts or Latin."""
    letters = Counter(character for character in text if character.isalpha())
    fitting = sum(
        count
        for letter, count in letters.items()
        if unicodedata.name(letter, "").split(" ")[0] in (*scripts, "LATIN", "FULLWIDTH")
    )
    return fitting >= _MIN_SCRIPT_SHARE * letters.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfPromptReport:
    """How a target did at writing prompts."""

    tries: int
    kept: int
    flaws: dict[str, int]
    """Why tries were not kept, with counts."""

    measured_prompts: int
    """The figures below are of the first this many prompts that were kept."""

    mean_words: float
    distinct_1: float
    """Different words over words."""

    distinct_2: float
    """Different pairs of neighbouring words over such pairs."""

    distinct_first_words: float
    """Different first words over prompts."""

    type_token: float
    """Different words over words in stretches of 1,000 words, averaged: unlike the two above it
    does not fall as prompts are added."""

    @property
    def share_kept(self) -> float:
        return self.kept / self.tries if self.tries else 0.0


class DiversityMeter:
    """Counts tries and measures the prompts that are kept; memory stays bounded."""

    def __init__(self) -> None:
        self.tries = 0
        self.kept = 0
        self._flaws: Counter[str] = Counter()
        self._measured = 0
        self._words: Counter[str] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._first_words: set[str] = set()
        self._segment: list[str] = []
        self._segment_shares: list[float] = []

    def reject(self, flaw: Flaw) -> None:
        self.tries += 1
        self._flaws[flaw] += 1

    def keep(self, words: Sequence[str]) -> None:
        self.tries += 1
        self.kept += 1
        if self._measured >= _MEASURED_ROWS:
            return
        self._measured += 1
        self._words.update(words)
        self._pairs.update(itertools.pairwise(words))
        self._first_words.update(words[:1])
        self._segment += words
        while len(self._segment) >= _SEGMENT_WORDS:
            segment, self._segment = (
                self._segment[:_SEGMENT_WORDS],
                self._segment[_SEGMENT_WORDS:],
            )
            self._segment_shares.append(len(set(segment)) / _SEGMENT_WORDS)

    def report(self) -> SelfPromptReport:
        segments = self._segment_shares
        if not segments and self._segment:
            segments = [len(set(self._segment)) / len(self._segment)]
        return SelfPromptReport(
            tries=self.tries,
            kept=self.kept,
            flaws=dict(sorted(self._flaws.items())),
            measured_prompts=self._measured,
            mean_words=_share(self._words.total(), self._measured),
            distinct_1=_share(len(self._words), self._words.total()),
            distinct_2=_share(len(self._pairs), self._pairs.total()),
            distinct_first_words=_share(len(self._first_words), self._measured),
            type_token=_share(sum(segments), len(segments)),
        )


def _share(part: float, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
