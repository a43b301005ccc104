"""Turns of an engine whose cycles run ahead of the host, and of everybody beside them.

    device   | cycle 1 | cycle 2 | prompts | cycle 3 | ...
    host         start 2, read 1 | start prompts    | start 3 (with those who joined), read 2, ...

Requests that need the host have ordinary passes of their own between cycles.
"""

import time
from collections.abc import Sequence as Many
from dataclasses import replace

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.commits import commit
from fledge.engine.cycle_end import CycleEnd
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.drafter import Drafter
from fledge.engine.exams import Exams
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.plan_choice import PlanChoice
from fledge.engine.scheduler import Scheduler, StepPlan
from fledge.engine.sequence import Sequence
from fledge.engine.steady import Steady
from fledge.engine.steady_flight import report_of
from fledge.engine.verifier import Verifier

_SHARE_AHEAD = 2.0
"""Time of cycles that run ahead over that of passes beside them."""

_SHARE_BEFORE_PROMPTS = 4.0
"""The same before the next pass over few prompts, while most places are taken: waiting a little
lets others come along, and a pass over one costs nearly what one over several does."""

_MANY_PROMPTS = 8
"""One in so many of the most requests there may be is worth a pass at once."""


class CycleAhead:
    """What `Steady` is asked for, and when."""

    def __init__(
        self,
        *,
        cache: PagedCache,
        scheduler: Scheduler,
        drafter: Drafter,
        verifier: Verifier,
        steady: Steady,
        choice: PlanChoice,
        end: CycleEnd,
        settings: EngineSettings,
        waits_for_cycles: bool = False,
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._drafter, self._verifier, self._steady = drafter, verifier, steady
        self._choice, self._end, self._settings = choice, end, settings
        self._exams = Exams(cache, scheduler, steady, choice)
        self._waits_for_cycles = waits_for_cycles
        self._beside_due = self._prompts_due = 0.0
        """When requests that need the host, and few prompts, have their next turn."""

        self._collected = 0.0
        """When the last cycle or prompt that ran ahead was read, or the first one begun."""

        self._cold_s = 0.0
        """What had been spent on capturing by then."""

        self.num_drains = 0
        """Times that everything in flight was awaited before there was anything new to run."""

    @property
    def steady(self) -> Steady:
        return self._steady

    def meets_requests(self) -> None:
        """Requests may start; whom of them the head is told of."""
        self._exams.meet_requests()

    def begins(self, plan: StepPlan, draft_plan: DraftPlan, load: Load) -> bool:
        """Start with what was planned for an ordinary cycle, if any of it can run ahead."""
        self._steady.bare.is_wanted = self._choice.is_asleep
        can_run = self._steady.can_run
        drafting = [seq for seq in plan.drafting if can_run(seq)]
        plain = [seq for seq in plan.plain if can_run(seq)]
        has_prompts = any(can_run(seq) for seq, _ in [*plan.finishing, *plan.reading])
        if not (drafting or plain or has_prompts):
            return False
        decoding = [*drafting, *plain]
        is_drafting = not draft_plan.is_plain if decoding else self._choice.expects_drafts
        if not self._steady.accepts(decoding, is_plain=not is_drafting):
            return False
        if draft_plan.is_plain:
            plain, drafting = decoding, []
        is_subset = bool(decoding) and self._choice.plan.num_drafted is not None
        self._collected = time.perf_counter()
        self._steady.begin(drafting, plain, is_drafting=is_drafting, is_subset=is_subset)
        if decoding:
            # What is planned for all places is not cut down to those who have come.
            wanted = draft_plan if load.menu is None or not is_drafting else self._choice.plan
            self._steady.start(self._steady.plans.fit(wanted, load), load)
        # Here too: where cycles have to be awaited again and again, none is ever gone on with.
        self._serve_others(plan)
        self._wait_if_asked()
        return True

    def goes_on(self) -> bool:
        """Start what comes next and read what came before; False if nothing runs ahead any more."""
        if not self._steady.is_running:
            return False
        places = self._steady.places
        self._steady.bare.is_wanted = self._choice.is_asleep
        places.drop_gone()
        if self._steady.num_in_flight and not self._steady.has_cycle_in_flight:
            self._finish_all()  # nothing else runs: who waits for a first token has it at once
            return True
        num_before = self._steady.num_in_flight
        self._take_in()
        beside = [seq for seq in self._others() if seq.is_decoding]
        load = self._choice.load(places.sequences)
        if places.num_requests:
            self._choice.choose(load)
        if not (self._has_room(beside) and self._starts_cycle(load)):
            self._choice.is_waiting = places.num_requests > 0
            self._drain()
            return False
        self._serve_others(self._plan_others(beside))
        for _ in range(num_before):
            self._finish_oldest()
        self._wait_if_asked()
        if places.num_requests or self._steady.has_prompts_in_flight:
            return True
        self._steady.forget()  # what is left in flight is of requests that have gone
        return False

    def _others(self) -> list[Sequence]:
        """Requests that run and are not among those that run ahead: most of the time nobody."""
        places, running = self._steady.places, self._scheduler.running
        if places.num_requests == len(running):
            return []
        return [seq for seq in running if not places.holds(seq)]

    @property
    def _num_unread(self) -> int:
        """Tokens of prompts that were begun; whoever runs ahead has read its own."""
        return sum(seq.num_unread for seq in self._others() if seq.is_reading)

    def _take_in(self) -> None:
        """Requests that decode and could run ahead are taken in: they had to go another way."""
        can_run = self._steady.can_run
        self._steady.join([seq for seq in self._others() if seq.is_decoding and can_run(seq)])
        if not self._scheduler.num_startable and not self._num_unread:
            self._steady.places.shrink()

    def _has_room(self, beside: Many[Sequence]) -> bool:
        return all(self._cache.reserve(seq, seq.len) for seq in beside)

    def _starts_cycle(self, load: Load) -> bool:
        """Start the next cycle if there is anybody to run it for; whether that could be done."""
        num_requests = self._steady.places.num_requests
        if not num_requests:
            return True
        plan = self._steady.plans.fit(self._choice.plan, load)
        if not self._steady.goes_on(plan):
            return False
        self._steady.start(plan, load)
        return True

    def _scheduler_has_prompts(self) -> bool:
        return self._num_unread > 0 or self._scheduler.could_admit

    def _plan_others(self, beside: Many[Sequence]) -> StepPlan:
        """Who is served behind the cycle that was just started."""
        plan = StepPlan()
        if self._are_prompts_due() and self._scheduler_has_prompts():
            num_preemptions = self._scheduler.num_preemptions
            self.meets_requests()
            plan = self._scheduler.plan_beside()
            if self._scheduler.num_preemptions != num_preemptions:
                self._verifier.forget_sampling()
                self._steady.places.drop_gone()
        # One that lost its memory may have come back at once, and reads again.
        plan.plain = [seq for seq in beside if seq.row >= 0 and not plan.holds(seq)]
        return plan

    def _are_prompts_due(self) -> bool:
        num_requests = self._steady.places.num_requests
        most = self._settings.max_requests
        if 2 * num_requests < most or time.perf_counter() >= self._prompts_due:
            return True
        if 2 * self._num_unread >= self._settings.max_pass_tokens:
            return True
        return _MANY_PROMPTS * self._scheduler.num_startable >= most

    def _serve_others(self, plan: StepPlan) -> None:
        """Read prompts of those who can join; who needs the host has a pass of its own.

        Such passes take a third of the time at most: those that run ahead go on with two thirds of
        their speed, however slow the others are.
        """
        can_run, holds = self._steady.can_run, self._steady.places.holds
        chunks = [*plan.finishing, *plan.reading]
        joining = [(seq, chunk) for seq, chunk in chunks if can_run(seq)]
        if joining:
            self._steady.bare.is_wanted = self._choice.is_asleep
            if self._choice.is_exam:
                self._steady.examine()
            self._steady.read(joining)
            self._end.settle([], [seq for seq, _ in joining])
        beside = [seq for seq in [*plan.drafting, *plan.plain] if not holds(seq)]
        ordinary = StepPlan(
            plain=beside if time.perf_counter() >= self._beside_due else [],
            finishing=[one for one in plan.finishing if not can_run(one[0])],
            reading=[one for one in plan.reading if not can_run(one[0])],
        )
        if ordinary:
            self._run_beside(ordinary)

    def _run_beside(self, plan: StepPlan) -> None:
        """An ordinary pass without drafts; the host waits for it."""
        started = time.perf_counter()
        result = self._verifier.run(plan, None)
        said = [*plan.plain, *(seq for seq, _ in plan.finishing)]
        self._end.settle(said, [seq for seq, _ in plan.reading])
        ended = time.perf_counter()
        self._beside_due = ended + _SHARE_AHEAD * (ended - started)
        self._collected += ended - started  # no time of the cycle that is read next
        self._end.report(
            CycleReport(
                plan=PLAIN,
                load=Load(num_requests=plan.num_decoding, num_other_tokens=plan.num_read_tokens),
                target_s=ended - started,
                draft_s=0.0,
                other_s=0.0,
                emitted=result.num_emitted,
                # Cycles that run ahead take another time.
                is_cold=True,
            )
        )

    def _wait_if_asked(self) -> None:
        if self._waits_for_cycles:
            self._finish_all()

    def _drain(self) -> None:
        """Await everything: the ordinary way comes next."""
        self.num_drains += 1
        self._finish_all()
        self._steady.forget()

    def _finish_all(self) -> None:
        while self._steady.num_in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Read what was started first."""
        got = self._steady.collect()
        said = list(got.said.values())
        num_fresh = sum(one.sequence.len - one.sequence.head_len for one in said if one.had_drafts)
        if got.started.has_head_read:
            for member, one in got.said.items():
                if member.is_drafted and not one.has_failed:
                    one.sequence.head_len = one.sequence.len
        result = commit(said)
        failed = [member for member, one in got.said.items() if one.has_failed]
        ended = [member for member in got.said if member.sequence.has_ended]
        self._steady.places.leave([*failed, *ended])
        self._end.settle([one.sequence for one in said], [])
        if not got.started.plan.is_plain and isinstance(self._drafter, HeadDrafter):
            self._drafter.calibration.count_cycle()
        collected, self._collected = self._collected, time.perf_counter()
        if got.started.is_reading:
            self._prompts_due = self._collected + _SHARE_BEFORE_PROMPTS * got.target_s
        # While something was captured for the next cycle, this one had long ended.
        cold_s, self._cold_s = self._cold_s, self._steady.counts.cold_s
        passes_s = got.draft_s + got.target_s + max(0.0, self._cold_s - cold_s)
        other_s = max(0.0, self._collected - collected - passes_s)
        report = report_of(got, num_fresh, other_s)
        self._end.report(
            replace(
                report,
                emitted=result.num_emitted,
                reached_D=result.reached_at_depth,
                accepted_D=result.accepted_at_depth,
                num_copies_offered=result.num_copies_offered,
                num_copies_accepted=result.num_copies_accepted,
            )
        )

    def forget(self) -> None:
        """Nobody asks for what is in flight."""
        self._steady.forget()
