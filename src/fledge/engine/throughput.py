"""What cycles really yielded, for the statistics."""

from fledge.engine.draft_plan import CycleReport


class Throughput:
    """Measured tokens per second, with drafts and without."""

    def __init__(self) -> None:
        self._tokens = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}
        self._cycles = {True: 0, False: 0}

    def add(self, report: CycleReport) -> None:
        has_drafts = not report.plan.is_plain
        self._tokens[has_drafts] += report.emitted
        self._seconds[has_drafts] += report.cycle_s
        self._cycles[has_drafts] += 1

    def state(self) -> dict[str, object]:
        def rate(has_drafts: bool) -> float | None:
            seconds = self._seconds[has_drafts]
            return self._tokens[has_drafts] / seconds if seconds > 0 else None

        return {
            "plain_cycles": self._cycles[False],
            "drafting_cycles": self._cycles[True],
            "plain_tokens_per_s": rate(False),
            "drafting_tokens_per_s": rate(True),
        }
