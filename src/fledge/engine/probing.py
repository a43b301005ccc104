"""When to run a cycle for what it teaches, and what that may cost.

A ledger grows by a small share of all time and pays for probes. A probe costs its time less what
its tokens would have taken otherwise, so probes that turn out well pay for more of them, and the
controller finds out quickly when drafting begins to pay. Expensive probes are followed by a long
silence.
"""

from fledge.engine.draft_plan import CycleReport

SHARE = 0.01
"""Of all time, what probes may cost on average."""
_MIN_INTERVAL = 6
"""Cycles between probes; their reports come late."""
_MAX_SAVED_CYCLES = 2.0
"""Cycles' worth of time the ledger holds at most."""
_LARGEST_PROBE_CYCLES = 0.4
"""A probe that costs more than so many cycles is left for a rare occasion."""
_RARE = 8


class ProbeLedger:
    """Time set aside for probes, and which kind is next."""

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._num_cycles = 0
        self._last_probe = 0
        self._num_probes = 0
        self._is_out = False

    def tick(self) -> None:
        """A cycle is about to start."""
        self._num_cycles += 1

    def is_due(self) -> bool:
        """Whether there is time for a probe now."""
        since = self._num_cycles - self._last_probe
        is_waiting = self._is_out and since < 8 * _MIN_INTERVAL
        return self._saved_s >= 0 and since >= _MIN_INTERVAL and not is_waiting

    def start(self) -> None:
        """A probe is about to run."""
        self._last_probe = self._num_cycles
        self._num_probes += 1
        self._is_out = True

    def allows(self, extra_cycles: float) -> bool:
        """Whether a probe of this cost, in cycles, may run now."""
        return extra_cycles <= _LARGEST_PROBE_CYCLES or self._num_probes % _RARE == _RARE - 1

    @property
    def turn(self) -> int:
        """Counts probes, for kinds that take turns."""
        return self._num_probes

    def observe(self, report: CycleReport, usual_rate: float) -> None:
        """A cycle has ended; `usual_rate` is what the plan in use yields, in tokens per second."""
        self._saved_s += SHARE * report.cycle_s
        if report.plan.is_probe:
            self._is_out = False
            self._saved_s -= report.cycle_s - report.emitted / usual_rate
        self._saved_s = min(self._saved_s, _MAX_SAVED_CYCLES * report.cycle_s)
