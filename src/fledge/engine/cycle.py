"""One turn of the engine: who runs, how much is drafted, draft, verify, commit, let go."""

import time
from collections.abc import Callable
from dataclasses import replace

from fledge.contracts.outputs import EngineStats
from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.controller import AdaptiveController
from fledge.engine.cycle_ahead import CycleAhead
from fledge.engine.cycle_end import CycleEnd
from fledge.engine.draft_plan import PLAIN, Controller, CycleReport, DraftPlan
from fledge.engine.drafter import Drafter
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.host_cycle import HostCycle
from fledge.engine.pass_times import PassTimes
from fledge.engine.plan_choice import PlanChoice
from fledge.engine.scheduler import Scheduler, StepPlan
from fledge.engine.stats import StatsKeeper
from fledge.engine.steady import Steady
from fledge.engine.verifier import Verifier
from fledge.models.target import Target
from fledge.ops.accept import Walk, walk_gumbel, walk_rejection


class Cycle:
    """The parts of an engine in the order they work."""

    def __init__(
        self,
        *,
        cache: PagedCache,
        scheduler: Scheduler,
        drafter: Drafter,
        verifier: Verifier,
        ahead: CycleAhead,
        choice: PlanChoice,
        end: CycleEnd,
        host: HostCycle,
        settings: EngineSettings,
    ) -> None:
        self._scheduler, self._drafter, self._verifier = scheduler, drafter, verifier
        self.ahead, self.choice, self._end, self.host = ahead, choice, end, host
        self._cache, self._settings = cache, settings

    @property
    def stats(self) -> StatsKeeper:
        return self._end.stats

    def run(self) -> None:
        """Plan, draft, verify, commit, let go; or go on with cycles that run ahead of the host."""
        if self.ahead.goes_on() or self.host.runs():
            return
        self.host.leave()
        started = time.perf_counter()
        running = self._scheduler.running
        decoding = [seq for seq in running if seq.is_decoding]
        num_unread = sum(seq.num_unread for seq in running) - len(decoding)
        load = self.choice.load(decoding, num_unread)
        self.choice.choose(load)
        num_preemptions = self._scheduler.num_preemptions
        self.ahead.meets_requests()
        plan = self._scheduler.plan(
            num_scratch=0 if self.choice.plan.is_plain else self._drafter.num_scratch,
            num_drafts=self.choice.plan.nodes if load.unread else 0,
        )
        if not plan:
            assert not self._scheduler.has_work, "there is work and nothing of it can run"
            return
        if self._scheduler.num_preemptions != num_preemptions:
            self._verifier.forget_sampling()
        planned = time.perf_counter()
        draft_plan = self._fit(self.choice.plan, plan)
        if self.ahead.begins(plan, draft_plan, load):
            return
        trees = None if draft_plan.is_plain else self._drafter.draft(plan.drafting, draft_plan)
        if trees is not None:
            draft_plan = replace(draft_plan, nodes=trees.num_drafts)
        drafted = time.perf_counter()
        result = self._verifier.run(plan, trees)
        verified = time.perf_counter()
        if not self.choice.plan.is_plain:
            read = [seq for seq, _ in [*plan.finishing, *plan.reading]]
            self._drafter.catch_up([seq for seq in read if seq.may_have_drafts])
        caught_up = time.perf_counter()
        said = [*plan.drafting, *plan.plain, *(seq for seq, _ in plan.finishing)]
        self._end.settle(said, [seq for seq, _ in plan.reading])
        now = time.perf_counter()
        draft_s, target_s = drafted - planned + caught_up - verified, verified - drafted
        drafter = None if draft_plan.is_plain else self._drafter
        self._end.report(
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
                num_copies_offered=result.num_copies_offered,
                num_copies_accepted=result.num_copies_accepted,
                # What an earlier draft left behind says nothing of a plain cycle.
                num_extended=drafter.num_extended if isinstance(drafter, HeadDrafter) else 0,
                gains=drafter.gains if isinstance(drafter, HeadDrafter) else None,
            )
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

    def report(self, controller: dict[str, object]) -> EngineStats:
        """What has happened so far, with what the controller says of itself."""
        return self.stats.report(
            self._scheduler,
            self._cache,
            self._drafter,
            controller | self.host.state(),
            self.ahead.steady.counts,
        )

    def forget_stats(self) -> None:
        """What ran so far was for nobody."""
        self._end.forget_stats()

    def forget(self) -> None:
        """Drop what runs ahead: a cycle was cut short, and nobody asks for its outcome."""
        self.choice.is_waiting = False
        self.ahead.forget()
        self.host.forget()


def make_cycle(
    target: Target,
    cache: PagedCache,
    drafter: Drafter,
    scheduler: Scheduler,
    verifier: Verifier,
    controller: Controller,
    settings: EngineSettings,
    walk: Callable[..., Walk],
    *,
    times: PassTimes | None,
    waits_for_cycles: bool,
) -> Cycle:
    """The turns of an engine made of these."""
    steady = Steady(target, cache, drafter, settings, controller.plans, walk)
    choice = PlanChoice(
        controller,
        steady.plans.menu,
        can_draft=drafter.num_scratch > 0,
        max_pass_tokens=settings.max_pass_tokens,
    )
    end = CycleEnd(cache, scheduler, drafter, choice)
    ahead = CycleAhead(
        cache=cache,
        scheduler=scheduler,
        drafter=drafter,
        verifier=verifier,
        steady=steady,
        choice=choice,
        end=end,
        settings=settings,
        waits_for_cycles=waits_for_cycles,
    )
    # Greedy requests walk alike by both rules; sampled ones are drawn on the host by one of them.
    is_exact = walk in (walk_gumbel, walk_rejection)
    host = HostCycle(
        target,
        cache,
        drafter,
        scheduler,
        end,
        settings,
        is_exact=is_exact,
        can_sample=walk is walk_gumbel,
        times=times if isinstance(controller, AdaptiveController) else None,
    )
    return Cycle(
        cache=cache,
        scheduler=scheduler,
        drafter=drafter,
        verifier=verifier,
        ahead=ahead,
        choice=choice,
        end=end,
        host=host,
        settings=settings,
    )
