"""What follows every pass: memory is tidied, the ended let go, and everybody told what it took."""

from collections.abc import Sequence as Many
from dataclasses import replace

from fledge.engine.cache import PagedCache
from fledge.engine.draft_plan import CycleReport
from fledge.engine.drafter import Drafter
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.plan_choice import PlanChoice
from fledge.engine.scheduler import Scheduler
from fledge.engine.sequence import Sequence
from fledge.engine.stats import StatsKeeper


class CycleEnd:
    """Settles what passes leave behind."""

    def __init__(
        self, cache: PagedCache, scheduler: Scheduler, drafter: Drafter, choice: PlanChoice
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._drafter, self._choice = drafter, choice
        self.stats = StatsKeeper()

    def forget_stats(self) -> None:
        """Count from here on."""
        self.stats = StatsKeeper()

    def settle(self, said: Many[Sequence], reading: Many[Sequence]) -> None:
        """Make what was computed known, let go of what windows left behind and of what ended."""
        self._scheduler.bill_all(said)
        everybody = [*said, *reading]
        for seq in everybody:
            if seq.finish_reason is not None or seq.error is not None:
                self.stats.count_ended(seq)
                self._scheduler.finish(seq, keep=seq.error is None)
        self._cache.tidy(everybody)
        if not self._scheduler.has_work:
            self._cache.check_nothing_held()

    def report(self, report: CycleReport) -> None:
        """Tell the statistics and the controller."""
        self.stats.count_cycle(report)
        drafter = self._drafter
        if report.gains is not None and isinstance(drafter, HeadDrafter):
            report = replace(report, is_calibrated=drafter.calibration.is_settled)
        # Of drafts whose requests have all left meanwhile nothing was seen.
        if report.load.num_requests and (report.plan.is_plain or report.num_drafted):
            self._choice.controller.observe(report)
        if isinstance(drafter, HeadDrafter):
            drafter.calibration.refresh_if_due()
