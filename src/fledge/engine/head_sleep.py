"""A head that is of no use sleeps, and is examined now and then.

Where the first drafts of trees do not bring half of what they cost a request alone, more of them do
not either, and under no load. The engine then goes on as one without a head: nothing is kept for
it, planned or tried. A small share of the time pays for exams: requests that come are told to the
head from their prompts on, and a few cycles draft for them. Where that looks hopeless the head
sleeps on; else it is awake, and judged as if it were new.

    awake ── drafts are useless ──> asleep ── time is saved, requests come ──> exam
      ^                               ^──────────── useless again ───────────────┤
      └───────────────────────────────────────────── worth another look ─────────┘
"""

from dataclasses import replace
from typing import Literal

from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.outlook import Planner

SHARE = 0.003
"""Of all time, what exams may cost on average at first; half of that after each one in vain."""
_MOST_HALVINGS = 3
_HOPELESS = 0.5
"""Of what drafts cost, what they bring at most where a head is of no use."""
_ENOUGH_TREES, _WINDOW_TREES = 8, 128
"""To be judged before a head may sleep, and after which the older ones count half."""
_DOUBT = 0.5
"""Trees that are taken to have been right, however few were seen."""
NUM_EXAMINED = 4
"""Requests that an exam tells the head of: a single cycle has the trees that come first."""
_FIRST_TREES, _MOST_TREES = NUM_EXAMINED, 12
"""Of an exam: where the first are refused it is over, and after so many it is decided."""
_FEW_RIGHT = 2
_FIRST_COST = 4.0
"""What the first exam is thought to cost, in cycles."""
_KEEPING = 0.015
"""Of an exam's cycles, what it costs to keep features in them."""
_MOST_TURNS = 8
"""Times that requests come while nobody can be drafted for: an exam that never begins is over."""
_RATE = 0.05
_ONE_DRAFT = DraftPlan(1, 1, 1)


class HeadSleep:
    """Whether the head sleeps, and when it is examined."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._state: Literal["awake", "asleep", "exam"] = "awake"
        self._num_judged = self._num_right = 0.0
        """Trees since the head was awake or its exam began, and those of which the target took a
        draft."""

        self._num_asked = self._num_answered = self._num_turns = 0
        """Of an exam: trees that were planned, those whose cycles have ended, and how often
        requests came before any was planned."""

        self._cycle_s = self._saved_s = self._spent_s = 0.0
        self._likely_cost_s: float | None = None
        self._num_in_vain = 0
        """Exams since the head was awake."""

        self.num_sleeps = self.num_exams = 0

    @property
    def is_asleep(self) -> bool:
        return self._state == "asleep"

    @property
    def is_exam(self) -> bool:
        return self._state == "exam"

    def judge(self, load: Load) -> None:
        """Fall asleep if what drafts bring is surely too little."""
        if self._state != "awake" or self._num_judged < _ENOUGH_TREES:
            return
        if self._num_right + _DOUBT < self._least_right(load):
            self.num_sleeps += 1
            self._num_in_vain = 0
            self._state = "asleep"

    def _least_right(self, load: Load) -> float:
        """Trees of those judged that should be right at first for the head to be of any use."""
        alone = Load(1, context_tokens=load.context_tokens // max(1, load.num_requests))
        return _HOPELESS * self._num_judged * self._planner.wanted(_ONE_DRAFT, alone)

    def meets_requests(self, *, has_room: bool) -> bool:
        """Requests come; whether they are to be told to the head."""
        if self._state == "awake":
            return True
        if self._state == "asleep" and has_room and self._can_pay():
            self.num_exams += 1
            self._state, self._spent_s = "exam", 0.0
            self._num_judged = self._num_right = 0.0
            self._num_asked = self._num_answered = self._num_turns = 0
        elif self._state == "exam" and not self._num_asked:
            self._num_turns += 1
            if self._num_turns > _MOST_TURNS:
                self._spent_s = self._saved_s
                self._end("asleep")
        return self._state == "exam"

    def _can_pay(self) -> bool:
        likely_s = self._likely_cost_s
        return self._saved_s > (_FIRST_COST * self._cycle_s if likely_s is None else likely_s)

    def plan(self, load: Load) -> DraftPlan:
        """Of an exam: drafts until enough were asked for, then what is known is awaited."""
        if self._num_answered >= self._num_asked:
            # Requests that ended meanwhile left trees that nobody judged.
            self._num_asked = self._num_answered = round(self._num_judged)
        wanted = _FIRST_TREES if self._num_judged < _FIRST_TREES else _MOST_TREES
        if load.menu is None or self._num_asked >= wanted:
            return PLAIN
        ready = [plan for plan in load.menu.drafting if plan in load.menu.ready]
        if not ready and load.menu.drafting:
            # What an exam costs where nothing is captured for it.
            capture_s = load.menu.capture_s
            if self._saved_s < capture_s:
                self._likely_cost_s = capture_s + _FIRST_COST * self._cycle_s
                self._state = "asleep"
                return PLAIN
            if not self._num_asked:
                self._spent_s += capture_s
            ready = list(load.menu.drafting)
        if not ready:
            return PLAIN
        self._num_asked += len(load.unread)
        return replace(ready[0], is_probe=True)

    def observe(self, report: CycleReport) -> None:
        """A cycle has ended."""
        self._cycle_s += (_RATE if self._cycle_s else 1.0) * (report.cycle_s - self._cycle_s)
        if self._state == "asleep":
            self._saved_s += SHARE * report.cycle_s / 2 ** min(self._num_in_vain, _MOST_HALVINGS)
            return
        if report.reached_D and not report.plan.is_plain:
            self._num_judged += report.reached_D[0]
            self._num_right += report.accepted_D[0]
        if self._state == "exam":
            self._num_answered += 0 if report.plan.is_plain else len(report.load.unread)
            self._count_costs(report)
            self._decide(report.load)
        elif self._num_judged > _WINDOW_TREES:
            self._num_judged, self._num_right = self._num_judged / 2, self._num_right / 2

    def _count_costs(self, report: CycleReport) -> None:
        if report.is_cold:
            return
        # A stutter of the machine is not the exam's to pay.
        cycle_s = min(report.cycle_s, 2.0 * self._planner.cycle_s(report.plan, report.load))
        self._spent_s += _KEEPING * cycle_s
        if not report.plan.is_plain:
            plain_s = report.emitted / self._planner.plain_rate(report.load)
            self._spent_s += max(0.0, cycle_s - plain_s)

    def _decide(self, load: Load) -> None:
        least, is_over = self._least_right(load), self._num_judged >= _MOST_TREES
        is_useless = self._num_judged >= _FIRST_TREES and self._num_right < least
        # Those who were to be drafted for may have gone.
        is_dear = self._spent_s > max(self._saved_s, _FIRST_COST * self._cycle_s)
        # A single right one may be chance, and what just pays is not worth being awake for.
        if is_over and self._num_right >= max(_FEW_RIGHT, least / _HOPELESS):
            self._end("awake")
        elif is_useless or is_dear or is_over:
            self._end("asleep")

    def _end(self, state: Literal["awake", "asleep"]) -> None:
        self._state, self._num_judged, self._num_right = state, 0.0, 0.0
        self._saved_s -= self._spent_s
        self._likely_cost_s = self._spent_s
        self._num_in_vain += 1

    def state(self) -> dict[str, object]:
        return {
            "head": self._state,
            "num_sleeps": self.num_sleeps,
            "num_exams": self.num_exams,
        }
