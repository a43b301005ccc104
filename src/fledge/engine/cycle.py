"""One turn of the engine: who runs, how much is drafted, draft, verify, commit, let go."""

import time
from dataclasses import replace

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.draft_plan import PLAIN, Controller, CycleReport, DraftPlan, Load
from fledge.engine.drafter import Drafter, HeadDrafter
from fledge.engine.scheduler import Scheduler, StepPlan
from fledge.engine.stats import StatsKeeper
from fledge.engine.verifier import Verifier, Yield

_CYCLES_PER_REFRESH = 32
"""Cycles between two looks at what the calibration has counted."""


class Cycle:
    """The parts of an engine in the order they work."""

    def __init__(
        self,
        *,
        cache: PagedCache,
        scheduler: Scheduler,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        settings: EngineSettings,
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._drafter, self._verifier = drafter, verifier
        self._controller, self._settings = controller, settings
        self._plan = PLAIN
        self.stats = StatsKeeper()

    def run(self) -> None:
        """Plan, draft, verify, commit, let go."""
        started = time.perf_counter()
        load = self._load()
        if load.unread and self._drafter.num_scratch:
            self._plan = self._controller.choose(load)
        num_preemptions = self._scheduler.num_preemptions
        plan = self._scheduler.plan(
            num_scratch=0 if self._plan.is_plain else self._drafter.num_scratch,
            num_drafts=self._plan.nodes if load.unread else 0,
        )
        if not plan:
            assert not self._scheduler.has_work, "there is work and nothing of it can run"
            return
        if self._scheduler.num_preemptions != num_preemptions:
            self._verifier.forget_sampling()
        planned = time.perf_counter()
        draft_plan = self._fit(self._plan, plan)
        trees = None if draft_plan.is_plain else self._drafter.draft(plan.drafting, draft_plan)
        if trees is not None:
            draft_plan = replace(draft_plan, nodes=trees.num_drafts)
        drafted = time.perf_counter()
        result = self._verifier.run(plan, trees)
        verified = time.perf_counter()
        if not self._plan.is_plain:
            read = [seq for seq, _ in [*plan.finishing, *plan.reading]]
            self._drafter.catch_up([seq for seq in read if seq.request.params.speculate])
        caught_up = time.perf_counter()
        self._settle(plan)
        now = time.perf_counter()
        draft_s, target_s = drafted - planned + caught_up - verified, verified - drafted
        self._report(
            plan, draft_plan, load, result, draft_s, target_s, now - started - draft_s - target_s
        )

    def _load(self) -> Load:
        decoding = [seq for seq in self._scheduler.running if seq.is_decoding]
        unread = sum(seq.num_unread for seq in self._scheduler.running) - len(decoding)
        return Load(
            num_requests=len(decoding),
            num_sampled=sum(not seq.request.params.is_greedy for seq in decoding),
            # However much there is to read, a quarter of the pass is open for drafts.
            num_other_tokens=min(unread, self._settings.max_pass_tokens * 3 // 4),
            context_tokens=sum(seq.kv_len for seq in decoding),
            unread=tuple(
                seq.len - seq.head_len for seq in decoding if seq.request.params.speculate
            ),
        )

    def _fit(self, wanted: DraftPlan, plan: StepPlan) -> DraftPlan:
        """The controller's plan for the requests that really have room for drafts."""
        if wanted.is_plain or not plan.drafting:
            return PLAIN
        if wanted.num_drafted is not None:
            # A probe drafts for those whom the head has to read least for.
            plan.drafting.sort(key=lambda seq: seq.len - seq.head_len)
            plan.plain += plan.drafting[wanted.num_drafted :]
            del plan.drafting[wanted.num_drafted :]
        is_everyone = len(plan.drafting) == plan.num_decoding
        wanted = replace(wanted, num_drafted=None if is_everyone else len(plan.drafting))
        room = self._settings.max_pass_tokens - plan.num_decoding - plan.num_read_tokens
        most = len(plan.drafting) * self._settings.tree.budget
        nodes = max(0, min(wanted.nodes, most, room))
        return replace(wanted, nodes=nodes) if nodes else PLAIN

    def _settle(self, plan: StepPlan) -> None:
        """Make what was computed known, let go of what windows left behind and of what ended."""
        said = [*plan.drafting, *plan.plain, *(seq for seq, _ in plan.finishing)]
        for seq in said:
            self._scheduler.bill(seq, seq.len)
        for seq in [*said, *(seq for seq, _ in plan.reading)]:
            if seq.has_ended:
                self.stats.count_ended(seq)
                self._scheduler.finish(seq, keep=seq.error is None)
            else:
                self._cache.publish(seq)
                self._cache.free_behind_windows(seq)
        if not self._scheduler.has_work:
            self._cache.check_integrity(self._scheduler.running)

    def _report(
        self,
        plan: StepPlan,
        draft_plan: DraftPlan,
        load: Load,
        result: Yield,
        draft_s: float,
        target_s: float,
        other_s: float,
    ) -> None:
        # What an earlier draft left behind says nothing of a plain cycle.
        drafter = None if draft_plan.is_plain else self._drafter
        report = CycleReport(
            plan=draft_plan,
            load=replace(
                load, num_requests=plan.num_decoding, num_other_tokens=plan.num_read_tokens
            ),
            target_s=target_s,
            draft_s=draft_s,
            other_s=other_s,
            emitted=result.num_emitted,
            reached_D=result.reached_at_depth,
            accepted_D=result.accepted_at_depth,
            num_extended=drafter.num_extended if isinstance(drafter, HeadDrafter) else 0,
            gains=drafter.gains if isinstance(drafter, HeadDrafter) else None,
        )
        self.stats.count_cycle(report)
        if plan.num_decoding:
            self._controller.observe(report)
        drafter = self._drafter
        if isinstance(drafter, HeadDrafter) and self.stats.num_cycles % _CYCLES_PER_REFRESH == 0:
            drafter.calibration.refresh()
