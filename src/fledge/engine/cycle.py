"""One turn of the engine: who runs, how much is drafted, draft, verify, commit, let go."""

import time
from collections.abc import Sequence as Many
from dataclasses import replace

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.commits import commit
from fledge.engine.draft_plan import PLAIN, Controller, CycleReport, DraftPlan, Load
from fledge.engine.drafter import Drafter
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.scheduler import Scheduler, StepPlan
from fledge.engine.sequence import Sequence
from fledge.engine.stats import StatsKeeper
from fledge.engine.steady import Steady
from fledge.engine.verifier import Verifier

_CYCLES_PER_REFRESH = 32
"""Cycles between two looks at what the calibration has counted."""

_SHARE_AHEAD = 2.0
"""Time of cycles that run ahead over that of passes beside them."""


class Cycle:
    """The parts of an engine in the order they work."""

    def __init__(
        self,
        *,
        cache: PagedCache,
        scheduler: Scheduler,
        drafter: Drafter,
        verifier: Verifier,
        steady: Steady,
        controller: Controller,
        settings: EngineSettings,
        waits_for_cycles: bool = False,
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._drafter, self._verifier, self._steady = drafter, verifier, steady
        self._controller, self._settings = controller, settings
        self._waits_for_cycles = waits_for_cycles
        self._plan = PLAIN
        self._is_waiting = False
        """Whether the plan is one that cycles in flight have to end for."""

        self._beside_due = 0.0
        """When requests beside a batch that runs ahead have their next turn."""

        self._collected = 0.0
        """When the last cycle that ran ahead was read, or the first one begun."""

        self.stats = StatsKeeper()

    def run(self) -> None:
        """Plan, draft, verify, commit, let go; or go on with cycles that run ahead of the host."""
        if self._steady.is_running:
            self._steady.drop_left()
            if self._steady.num_requests:
                self._run_ahead()
                return
            self._steady.forget()
        started = time.perf_counter()
        load = self._load(self._scheduler.running)
        self._choose(load)
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
        if not plan.num_read_tokens and self._begins_ahead(plan, draft_plan, load):
            return
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
        said = [*plan.drafting, *plan.plain, *(seq for seq, _ in plan.finishing)]
        self._settle(said, [seq for seq, _ in plan.reading])
        now = time.perf_counter()
        draft_s, target_s = drafted - planned + caught_up - verified, verified - drafted
        drafter = None if draft_plan.is_plain else self._drafter
        self._report(
            CycleReport(
                plan=draft_plan,
                load=replace(
                    load, num_requests=plan.num_decoding, num_other_tokens=plan.num_read_tokens
                ),
                target_s=target_s,
                draft_s=draft_s,
                other_s=now - started - draft_s - target_s,
                emitted=result.num_emitted,
                reached_D=result.reached_at_depth,
                accepted_D=result.accepted_at_depth,
                # What an earlier draft left behind says nothing of a plain cycle.
                num_extended=drafter.num_extended if isinstance(drafter, HeadDrafter) else 0,
                gains=drafter.gains if isinstance(drafter, HeadDrafter) else None,
            )
        )

    def _choose(self, load: Load) -> None:
        """Have the controller plan, unless what it planned last still waits to be run."""
        if self._is_waiting:
            self._is_waiting = False
        elif load.unread and self._drafter.num_scratch:
            self._plan = self._controller.choose(load)
        elif load.num_requests:
            self._plan = PLAIN

    def _begins_ahead(self, plan: StepPlan, draft_plan: DraftPlan, load: Load) -> bool:
        """Start the first of several cycles; what it says is read when the second runs.

        Requests that need the host have passes of their own meanwhile.
        """
        drafting = [seq for seq in plan.drafting if self._steady.can_run(seq)]
        plain = [seq for seq in plan.plain if self._steady.can_run(seq)]
        if not self._steady.accepts([*drafting, *plain], is_plain=draft_plan.is_plain):
            return False
        if draft_plan.is_plain:
            plain, drafting = [*drafting, *plain], []
        is_subset = self._plan.num_drafted is not None
        self._collected = time.perf_counter()
        self._steady.begin(drafting, plain, is_subset=is_subset)
        self._steady.start(self._steady.plan_for(draft_plan, len(drafting) + len(plain)), load)
        # Here too: where cycles have to be awaited again and again, none is ever gone on with.
        self._serve_beside(
            [seq for seq in [*plan.drafting, *plan.plain] if not self._steady.holds(seq)]
        )
        while self._waits_for_cycles and self._steady.is_running:
            self._finish_ahead()
        return True

    def _run_ahead(self) -> None:
        """Start the next cycle of the same requests, then read the one before it."""
        beside = [seq for seq in self._scheduler.running if not self._steady.holds(seq)]
        if not self._scheduler.could_admit and self._can_be_beside(beside):
            load = self._load([seq for seq in self._scheduler.running if seq not in beside])
            self._choose(load)
            ahead = self._steady.plan_for(self._plan, self._steady.num_requests)
            if self._steady.goes_on(ahead):
                self._steady.start(ahead, load)
                self._serve_beside(beside)
                self._finish_ahead()
                return
            self._is_waiting = True
        while self._steady.is_running:
            self._finish_ahead()

    def _can_be_beside(self, sequences: Many[Sequence]) -> bool:
        """Whether all of these decode, need the host for it, and have room for one more token."""
        return all(
            seq.is_decoding and not self._steady.can_run(seq) and self._cache.reserve(seq, seq.len)
            for seq in sequences
        )

    def _serve_beside(self, sequences: Many[Sequence]) -> None:
        """Requests that need the host take a plain pass of their own, a third of the time at most.

        Those that run ahead go on with two thirds of their speed, however slow the others are.
        """
        started = time.perf_counter()
        if not sequences or started < self._beside_due:
            return
        result = self._verifier.run(StepPlan(plain=list(sequences)), None)
        self._settle(sequences, [])
        ended = time.perf_counter()
        self._beside_due = ended + _SHARE_AHEAD * (ended - started)
        self._collected += ended - started  # no time of the cycle that is read next
        self._report(
            CycleReport(
                plan=PLAIN,
                load=Load(num_requests=len(sequences)),
                target_s=ended - started,
                draft_s=0.0,
                other_s=0.0,
                emitted=result.num_emitted,
                # Cycles that run ahead take another time.
                is_cold=True,
            )
        )

    def _finish_ahead(self) -> None:
        """Read the oldest cycle that was started."""
        got = self._steady.collect()
        said = list(got.said.values())
        num_fresh = sum(one.sequence.len - one.sequence.head_len for one in said if one.had_drafts)
        for one in said:
            if one.had_drafts and not one.has_failed:
                one.sequence.head_len = one.sequence.len
        result = commit(said)
        for place, one in got.said.items():
            if one.sequence.has_ended or one.has_failed:
                self._steady.leave(place)
        self._settle([one.sequence for one in said], [])
        if not got.plan.is_plain and isinstance(self._drafter, HeadDrafter):
            self._drafter.calibration.count_cycle()
        collected, self._collected = self._collected, time.perf_counter()
        passes_s = got.draft_s + got.target_s
        num_drafted = sum(one.had_drafts for one in said)
        self._report(
            CycleReport(
                plan=replace(
                    got.plan, num_drafted=None if num_drafted == len(said) else num_drafted
                ),
                load=replace(got.load, num_requests=len(said), num_other_tokens=0),
                target_s=got.target_s,
                draft_s=got.draft_s,
                other_s=max(0.0, self._collected - collected - passes_s),
                emitted=result.num_emitted,
                reached_D=result.reached_at_depth,
                accepted_D=result.accepted_at_depth,
                num_extended=num_fresh + got.num_caught_up,
                gains=got.gains,
                is_cold=got.is_cold,
            )
        )

    def _load(self, sequences: Many[Sequence]) -> Load:
        decoding = [seq for seq in sequences if seq.is_decoding]
        unread = sum(seq.num_unread for seq in sequences) - len(decoding)
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

    def _settle(self, said: Many[Sequence], reading: Many[Sequence]) -> None:
        """Make what was computed known, let go of what windows left behind and of what ended."""
        for seq in said:
            self._scheduler.bill(seq, seq.len)
        for seq in [*said, *reading]:
            if seq.has_ended:
                self.stats.count_ended(seq)
                self._scheduler.finish(seq, keep=seq.error is None)
            else:
                self._cache.publish(seq)
                self._cache.free_behind_windows(seq)
        if not self._scheduler.has_work:
            self._cache.check_integrity(self._scheduler.running)

    def _report(self, report: CycleReport) -> None:
        self.stats.count_cycle(report)
        # Of drafts whose requests have all left meanwhile nothing was seen.
        if report.load.num_requests and (report.plan.is_plain or report.num_drafted):
            self._controller.observe(report)
        drafter = self._drafter
        if isinstance(drafter, HeadDrafter) and self.stats.num_cycles % _CYCLES_PER_REFRESH == 0:
            drafter.calibration.refresh()

    def forget(self) -> None:
        """Drop what runs ahead: a cycle was cut short, and nobody asks for its outcome."""
        self._is_waiting = False
        self._steady.forget()
