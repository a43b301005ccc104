"""What captured cycles with drafts yielded over what was expected, for each size of batch.

The best of many estimates is likely one that is too good, and some of what drafting costs is in no
model: requests end at different times, so that the last ones leave places empty. Rates that are
expected of drafting are lowered by what was missing before, and never raised. While nothing is
drafted this is forgotten, so that drafting is tried again some day.
"""

from dataclasses import dataclass

from fledge.engine.draft_plan import CycleReport, Load

_KEPT = 1.0 - 1.0 / 64.0
_DOUBTED_CYCLES = 8.0
"""Cycles' worth of tokens that are taken to be as expected before any was seen."""
_KEPT_WITHOUT_DRAFTS = 1.0 - 1.0 / 256.0


@dataclass(slots=True)
class _Sums:
    emitted: float = 0.0
    expected: float = 0.0
    cycles: float = 0.0

    def keep(self, share: float) -> None:
        """Let go of the rest."""
        self.emitted *= share
        self.expected *= share
        self.cycles *= share


class YieldCheck:
    """Tokens that came over tokens that were expected in the same time."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def share(self, load: Load) -> float:
        """Of a rate that is expected of drafting under a load, what to believe: 1 at most."""
        sums = None if load.menu is None else self._sums.get(load.num_places)
        if sums is None or sums.expected == 0.0:  # nothing seen, or only requests that failed
            return 1.0
        doubted = _DOUBTED_CYCLES * sums.expected / sums.cycles
        return min(1.0, (sums.emitted + doubted) / (sums.expected + doubted))

    def observe(self, report: CycleReport, expected_rate: float) -> None:
        """A cycle of a plan has ended, of which so many tokens a second were expected."""
        if report.load.menu is None:
            return
        sums = self._sums.setdefault(report.load.num_places, _Sums())
        if report.plan.is_plain:
            sums.keep(_KEPT_WITHOUT_DRAFTS)
            return
        # A pause of the host is not the drafts' fault.
        expected = min(expected_rate * report.cycle_s, 2.0 * report.emitted)
        sums.keep(_KEPT)
        sums.emitted += report.emitted
        sums.expected += expected
        sums.cycles += 1.0
