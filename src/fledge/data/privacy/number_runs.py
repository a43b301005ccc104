"""Numbers in groups: runs of digits, and the windows of them that may be an identifier.

    "4111 1111 1111 1111 12/27"     one run of six groups
                                    its windows: "4111 1111 1111 1111", "1111 12/27", ...

A window's shape is the lengths of its groups with what stands between them, "4 4 4 4" or
"(3) 3-4": most formats of cards, phone numbers and national ids are recognised by it. Dates, years,
IP addresses and ISBNs belong to no window, and a window ends neither at a decimal point nor within
a longer token.
"""

import re
from bisect import bisect_left
from collections.abc import Container, Iterator
from typing import NamedTuple

from stdnum import isbn

MAX_DIGITS = 19
_NEAR = 24
"""Groups that begin within as many characters of the run's begin still have words beside them."""

_SEPARATOR = r"(?:\)[ .\-/]?|[ \-]?\(| [/\-] |[ .\-/])"
# A set of characters first, then what may not stand before it: `re` skips to such characters fast.
_RUN = re.compile(rf"[0-9](?<![A-Za-z0-9].)(?:{_SEPARATOR}?+[0-9]){{6,}}+")
_GROUP = re.compile(r"[0-9]+")
# Part of a longer token on the left (`a-123`, `x_123`, `/123`, `3,123`) or on the right, money, or
# a term of a sum; an extension ("x42") is none of these.
_GLUED_BEFORE = re.compile(r"(?:[A-Za-z0-9][\-_/]|[0-9][.,:]|[_$€£¥₹])$")
_GLUED_AFTER = re.compile(
    r"(?![xX][0-9]{1,6}(?![0-9A-Za-z]))[A-Za-z0-9_%]|[-/][A-Za-z]|[,:][0-9]|\.[0-9A-Za-z]"
    r"| ?(?:EUR|USD|€|\$|=|>>|×|÷|\* ?[0-9(])"
)

_YEAR = r"(?:1[5-9]|20|21)[0-9]{2}"
_MONTH = r"(?:0?[1-9]|1[0-2])"
_DAY = r"(?:0?[1-9]|[12][0-9]|3[01])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_OTHER_NUMBER = re.compile(
    rf"""(?<![0-9])(?<![0-9][-./])(?:
        {_YEAR}(?P<s>[-./]){_MONTH}(?P=s){_DAY}
        | {_DAY}(?P<t>[-./]){_MONTH}(?P=t)(?:{_YEAR}|[0-9]{{2}})
        | {_MONTH}(?P<u>[-./]){_DAY}(?P=u)(?:{_YEAR}|[0-9]{{2}})
        | (?:19|20)[0-9]{{2}}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:[0-9]{{4}}|[0-9]{{6}})?
        | {_YEAR}\ ?[-/]\ ?{_YEAR}
        | {_OCTET}(?:\.{_OCTET}){{3}}
        | (?P<isbn>97[89](?:[-\ ]?[0-9]){{10}})
    )(?![0-9]|[-./][0-9])""",
    re.VERBOSE,
)


class Window(NamedTuple):
    """Some neighbouring groups of a run."""

    start: int
    end: int
    digits: str
    shape: str
    run: tuple[int, int]
    """Begin and end of the whole run."""

    is_near: bool
    """Close enough to the begin of its run to have words before it."""

    is_whole: bool
    """It holds all groups of its run."""


class _Group(NamedTuple):
    start: int
    end: int
    separator: str
    """What stands between the group before it and this one."""

    is_border: bool
    """A window may begin here; the one before it may end there."""


def find_windows(text: str, shapes: Container[str], lengths: Container[int]) -> Iterator[Window]:
    """Windows of these shapes; also of so many digits, near the begin of a run or a whole run."""
    for match in _RUN.finditer(text):
        groups: list[_Group] = []
        end = match.start()
        for digits in _GROUP.finditer(text, match.start(), match.end()):
            separator = text[end : digits.start()]
            start, end = digits.span()
            is_border = not groups or separator == "/" or " " in separator
            groups.append(_Group(start, end, separator, is_border))
        yield from _windows(text, groups, shapes, lengths)


def _windows(
    text: str, groups: list[_Group], shapes: Container[str], lengths: Container[int]
) -> Iterator[Window]:
    barred = _barred(text, groups)
    run = groups[0].start, groups[-1].end
    num_groups = len(groups)
    group_lens = [group.end - group.start for group in groups]
    pieces = [f"{group.separator}{group.end - group.start}" for group in groups]
    for first, begin in enumerate(groups):
        if not begin.is_border or first in barred:
            continue
        is_near = begin.start - groups[0].start <= _NEAR
        is_open = text[begin.start - 1 : begin.start] + text[begin.end : begin.end + 1] == "()"
        shape = f"({group_lens[first]}" if is_open else str(group_lens[first])
        num_digits = group_lens[first]
        last = first
        while num_digits <= MAX_DIGITS:
            is_whole = last - first + 1 == num_groups
            if (shape in shapes or ((is_near or is_whole) and num_digits in lengths)) and (
                last + 1 == num_groups or groups[last + 1].is_border
            ):
                end = groups[last].end
                digits = "".join([text[g.start : g.end] for g in groups[first : last + 1]])
                yield Window(begin.start - is_open, end, digits, shape, run, is_near, is_whole)
            # Within an identifier no group is a single digit, unless all of them are.
            is_split = group_lens[last] == 1 and last > first
            last += 1
            if last == num_groups or last in barred or (is_split and num_groups > MAX_DIGITS):
                break
            shape += pieces[last]
            num_digits += group_lens[last]


def _barred(text: str, groups: list[_Group]) -> set[int]:
    """Groups that belong to a date, a range of years, an IP address, an ISBN or a longer token."""
    barred: set[int] = set()
    begin, end = groups[0].start, groups[-1].end
    if _GLUED_BEFORE.search(text, max(0, begin - 2), begin):
        barred.add(0)
    if _GLUED_AFTER.match(text, end):
        barred.add(len(groups) - 1)
    for match in _OTHER_NUMBER.finditer(text, begin, end):
        if match["isbn"] is None or isbn.is_valid(match["isbn"]):
            first = bisect_left(groups, match.start(), key=lambda group: group.start)
            last = bisect_left(groups, match.end(), key=lambda group: group.end)
            barred.update(range(first, last + 1))
    return barred
