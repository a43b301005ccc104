"""Identifiers made of digits alone, by the rules of each type."""

import re
from collections import defaultdict
from collections.abc import Iterator

from fledge.data.privacy.cards import CARD_RULES
from fledge.data.privacy.finding import Finding
from fledge.data.privacy.national_ids import NATIONAL_ID_RULES
from fledge.data.privacy.number_rule import NumberRule
from fledge.data.privacy.number_runs import Window, find_windows
from fledge.data.privacy.phones import PHONE_RULES, is_international
from fledge.data.privacy.words import Around, WordIndex, Words

_RULES = (*CARD_RULES, *PHONE_RULES, *NATIONAL_ID_RULES)
_BY_SHAPE: defaultdict[str, list[NumberRule]] = defaultdict(list)
_BY_LENGTH: defaultdict[int, list[NumberRule]] = defaultdict(list)
for _rule in _RULES:
    for _shape in _rule.shapes:
        _BY_SHAPE[_shape].append(_rule)
    if _rule.words is None:
        for _length in _rule.lengths:
            _BY_LENGTH[_length].append(_rule)
_NAMED = [(rule, rule.words) for rule in _RULES if rule.words is not None]
_NAMED_WORDS = WordIndex([words for _, words in _NAMED])
_DECIMAL = re.compile(r"[0-9]+\.[0-9]+")
_LENGTHS = frozenset(length for rule in _RULES for length in rule.lengths)


def find_numbers(text: str) -> Iterator[Finding]:
    """Cards, phone numbers and national ids; a window may be several things."""
    run = (0, 0)
    named: list[tuple[NumberRule, Words]] = []
    for window in find_windows(text, _BY_SHAPE, _LENGTHS):
        if window.run != run:
            # Words beside a window are beside its run: few runs have any, and one look tells which.
            run = window.run
            named = [_NAMED[i] for i in Around(text, *run).entries_said(_NAMED_WORDS)]
        if _is_behind_plus(text, window) and is_international(window.digits):
            yield Finding("phone", window.start - 1, window.end, 0.9)
        for rule in _rules_that_fit(text, window, named):
            yield Finding(rule.type, window.start, window.end, rule.score)


def _rules_that_fit(
    text: str, window: Window, named: list[tuple[NumberRule, Words]]
) -> Iterator[NumberRule]:
    length = len(window.digits)
    rules = _BY_SHAPE.get(window.shape, [])
    if window.is_near or window.is_whole:
        rules = [*rules, *_BY_LENGTH.get(length, ())]
        named = [(rule, words) for rule, words in named if length in rule.lengths]
    else:
        named = []
    around: Around | None = None
    for rule in rules:
        if rule.check(window):
            around = around or Around(text, window.start, window.end)
            if rule.other_words is None or not around.says(rule.other_words):
                yield rule
    for rule, words in named:
        if rule.check(window):
            around = around or Around(text, window.start, window.end)
            if _is_said(rule, words, around):
                yield rule


def _is_behind_plus(text: str, window: Window) -> bool:
    """A plus that is not the sign of a number or between two: `+3.14`, `x+49`, `3 +49`."""
    start = window.start
    if start == 0 or text[start - 1] != "+" or _DECIMAL.fullmatch(window.shape):
        return False
    before = text[max(0, start - 3) : start - 1]
    is_glued = before[-1:].isascii() and before[-1:].isalnum()
    return not is_glued and not before.rstrip()[-1:].isdigit()


def _is_said(rule: NumberRule, words: Words, around: Around) -> bool:
    """Its words stand beside it, and others do not say that it is something else."""
    if not around.says(words):
        return False
    if rule.other_words is None:
        return True
    if rule.are_words_weak:
        return not around.says(rule.other_words)
    return around.says_last(words, rule.other_words)
