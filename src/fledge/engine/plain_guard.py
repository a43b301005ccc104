"""The last line against losing to plain decoding: what cycles really yielded, no model of why.

Each cycle with drafts is compared with the tokens that plain decoding would have emitted in the
same time. When the average is below zero by more than chance explains, drafting pauses; the pause
doubles each time this happens again and shrinks while drafting wins. Loads within a factor of two
are judged together, others apart: what few requests gain says nothing of many.
"""

import math

from fledge.engine.draft_plan import CycleReport, Load

_KEPT = 1.0 - 1.0 / 64.0
_MIN_CYCLES = 16.0
_SURE = 2.0
"""Standard errors below zero that are taken as proof."""
_SHORTEST_PAUSE = 64
_LONGEST_PAUSE = 2048


class PlainGuard:
    """Watches the advantage of drafting over plain decoding."""

    def __init__(self) -> None:
        self._count = 0.0
        self._sum = 0.0
        self._squares = 0.0
        self._pause = _SHORTEST_PAUSE
        self._left = 0

    @property
    def is_pausing(self) -> bool:
        return self._left > 0

    @property
    def advantage(self) -> float | None:
        """Tokens gained per request and cycle over plain decoding, None before any draft."""
        return self._sum / self._count if self._count else None

    def tick(self) -> None:
        """A cycle is about to start."""
        self._left = max(0, self._left - 1)

    def observe(self, report: CycleReport, plain_rate: float) -> None:
        """A cycle with drafts has ended; `plain_rate` is plain decoding's under the same load."""
        if report.is_catching_up:
            return  # which is paid once
        plain_tokens = plain_rate * report.cycle_s
        gained = (report.emitted - plain_tokens) / max(1, report.load.num_requests)
        gained = max(gained, -float(report.plan.depth))  # a stutter is no reason to doubt for long
        self._count = _KEPT * self._count + 1.0
        self._sum = _KEPT * self._sum + gained
        self._squares = _KEPT * self._squares + gained * gained
        if self._count < _MIN_CYCLES:
            return
        mean = self._sum / self._count
        error = math.sqrt(max(0.0, self._squares / self._count - mean * mean) / self._count)
        if mean + _SURE * error < 0 and not self.is_pausing:
            self._left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._count = self._sum = self._squares = 0.0
        elif mean - _SURE * error > 0:
            self._pause = _SHORTEST_PAUSE


class PlainGuards:
    """A guard for each load."""

    def __init__(self) -> None:
        self._guards: dict[int, PlainGuard] = {}

    def of(self, load: Load) -> PlainGuard:
        """The one that watches loads like this."""
        return self._guards.setdefault(load.num_rows.bit_length(), PlainGuard())
