"""What cycles with drafts yielded over what was expected of them, for each size of batch.

The best of many estimates is likely one that is too good, and some of what drafting costs is in no
model: requests end at different times, so that the last ones leave places empty. Rates that are
expected of drafting are lowered by what was missing before, and never raised.
"""

from dataclasses import dataclass

from fledge.engine.draft_plan import CycleReport, Load

_KEPT = 1.0 - 1.0 / 64.0
_DOUBTED_CYCLES = 8.0
"""Cycles' worth of tokens that are taken to be as expected before any was seen."""


@dataclass(slots=True)
class _Sums:
    emitted: float = 0.0
    expected: float = 0.0
    cycles: float = 0.0


class YieldCheck:
    """Tokens that came over tokens that were expected in the same time."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def share(self, load: Load) -> float:
        """Of a rate that is expected of drafting under a load, what to believe: 1 at most."""
        sums = self._sums.get(_size(load))
        if sums is None or sums.cycles == 0.0:
            return 1.0
        doubted = _DOUBTED_CYCLES * sums.expected / sums.cycles
        return min(1.0, (sums.emitted + doubted) / (sums.expected + doubted))

    def observe(self, report: CycleReport, expected_rate: float) -> None:
        """A cycle with drafts has ended, of which so many tokens a second were expected."""
        sums = self._sums.setdefault(_size(report.load), _Sums())
        expected = expected_rate * report.cycle_s
        # A pause of the host is not the drafts' fault.
        expected = min(expected, 2.0 * report.emitted)
        sums.emitted = _KEPT * sums.emitted + report.emitted
        sums.expected = _KEPT * sums.expected + expected
        sums.cycles = _KEPT * sums.cycles + 1.0


def _size(load: Load) -> int:
    """Batches of one size, or loads within a factor of two."""
    return -load.num_places if load.menu is not None else load.num_requests.bit_length()
