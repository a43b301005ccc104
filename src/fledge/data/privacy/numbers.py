"""Identifiers made of digits alone, by the rules of each type."""

from collections import defaultdict
from collections.abc import Iterator

from fledge.data.privacy.cards import CARD_RULES
from fledge.data.privacy.finding import Finding
from fledge.data.privacy.national_ids import NATIONAL_ID_RULES
from fledge.data.privacy.number_rule import NumberRule
from fledge.data.privacy.number_runs import find_windows
from fledge.data.privacy.phones import PHONE_RULES, is_international
from fledge.data.privacy.words import Around, look_around

_BY_SHAPE: defaultdict[str, list[NumberRule]] = defaultdict(list)
_BY_LENGTH: defaultdict[int, list[NumberRule]] = defaultdict(list)
for _rule in (*CARD_RULES, *PHONE_RULES, *NATIONAL_ID_RULES):
    for _shape in _rule.shapes:
        _BY_SHAPE[_shape].append(_rule)
    for _length in _rule.lengths:
        _BY_LENGTH[_length].append(_rule)


def find_numbers(text: str) -> Iterator[Finding]:
    """Cards, phone numbers and national ids; a window may be several things."""
    for window in find_windows(text, _BY_SHAPE, _BY_LENGTH):
        if _is_behind_plus(text, window.start) and is_international(window.digits):
            yield Finding("phone", window.start - 1, window.end, 0.9)
        rules = _BY_SHAPE.get(window.shape, [])
        if window.is_near or window.is_whole:
            rules = rules + _BY_LENGTH[len(window.digits)]
        around = None
        for rule in rules:
            # Words are looked for before the check where they are needed, else after it: whichever
            # is the cheaper way to a no.
            if rule.words is None and not rule.check(window):
                continue
            around = around or look_around(text, window.start, window.end)
            if rule.words is not None and not (around.says(rule.words) and rule.check(window)):
                continue
            if _is_said(rule, around):
                yield Finding(rule.type, window.start, window.end, rule.score)


def _is_behind_plus(text: str, start: int) -> bool:
    """A plus that is not a sign between two terms: `x+49`, `3 +49`."""
    if start == 0 or text[start - 1] != "+":
        return False
    before = text[max(0, start - 3) : start - 1]
    is_glued = before[-1:].isascii() and before[-1:].isalnum()
    return not is_glued and not before.rstrip()[-1:].isdigit()


def _is_said(rule: NumberRule, around: Around) -> bool:
    """The words beside it do not say that it is something else."""
    if rule.other_words is None:
        return True
    if rule.words is None or rule.are_words_weak:
        return not around.says(rule.other_words)
    return around.says_last(rule.words, rule.other_words)
