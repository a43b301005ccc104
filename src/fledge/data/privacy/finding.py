"""What was found in a text, and which findings stay when several claim the same characters."""

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple


class Finding(NamedTuple):
    """Characters `start` to `end` of a text are an identifier of this type."""

    type: str
    """One of `fledge.contracts.data_settings.PRIVACY_TYPES`."""

    start: int
    end: int
    score: float
    """How sure the rule is, between 0 and 1; it decides between overlapping findings."""


def resolve(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that do not overlap, in the order of the text.

    The higher score wins, then the longer one, then the earlier one, then the type's name: the
    result does not depend on the order in which rules ran.
    """
    ranked = sorted(findings, key=lambda f: (-f.score, f.start - f.end, f.start, f.type))
    taken: list[Finding] = []
    for finding in ranked:
        after = bisect(taken, finding.start, key=lambda f: f.start)
        begins_inside = after > 0 and taken[after - 1].end > finding.start
        ends_inside = after < len(taken) and taken[after].start < finding.end
        if not (begins_inside or ends_inside):
            taken.insert(after, finding)
    return taken
