"""How much to draft in the next cycle, down to nothing, for the most tokens per second.

Expected tokens come from `AcceptanceModel`, expected seconds from `CycleCosts`; `Planner` compares
all plans. A plan is kept until another is clearly better. Now and then a cycle is run as a probe:
with drafts while decoding plainly, deeper or wider or without drafts while drafting. `PlainGuard`
pauses drafting when what cycles really yield is below plain decoding, whatever the models say.
`HeadSleep` lets a head sleep that is of no use under any load.

Choosing must cost next to nothing: plans are remembered per load, and compared every few cycles.
"""

import math
from dataclasses import replace

from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_plan import PLAIN, Controller, CycleReport, DraftPlan, Load
from fledge.engine.fixed_controller import FixedController
from fledge.engine.head_sleep import HeadSleep
from fledge.engine.menu_planner import MenuPlanner
from fledge.engine.outlook import Planner
from fledge.engine.pass_times import PassTimes
from fledge.engine.plain_guard import PlainGuards
from fledge.engine.plan_comparison import Choice, PlanComparison
from fledge.engine.probing import Prober
from fledge.engine.throughput import Throughput
from fledge.engine.yield_check import YieldCheck

__all__ = [
    "AdaptiveController",
    "Controller",
    "CycleReport",
    "DraftPlan",
    "FixedController",
    "Load",
]

_RELUCTANCE = (0.025, 0.1)
"""What drafting has to gain before it begins, beyond being clearly better, and what that grows to
after many returns to plain decoding: the best of many estimates is likely one that is too good."""
_RELUCTANCE_CYCLES = 1024
_CYCLES_PER_COMPARISON = 12
_CYCLES_PER_MEASUREMENT = 4
_FEW_REQUESTS = 4
"""Up to so many, candidates are measured twice as often: one cycle says little."""
_WARM_UP_CYCLES = 2
"""The first cycles choose kernels and touch new memory: they decode plainly and teach nothing."""
_COLD_CYCLES = 16


class AdaptiveController:
    """Drafts as much as pays."""

    def __init__(self, tree: TreeSettings, times: PassTimes, *, max_pass_tokens: int) -> None:
        self._tree = tree
        self._model = AcceptanceModel(tree)
        self._costs = CycleCosts(times)
        self._planner = Planner(tree, self._model, self._costs, max_pass_tokens)
        self._menu = MenuPlanner(tree, self._costs, self._planner, max_pass_tokens)
        self._comparison = PlanComparison(self._planner, self._menu)
        self._prober = Prober(tree, self._model, self._costs, self._planner)
        self._guards = PlainGuards()
        self._guard = self._guards.of(Load(num_requests=1))
        """Of the newest load."""

        self._yields = YieldCheck()
        self._sleep = HeadSleep(self._planner)
        self._tokens = Throughput()
        self._choices: dict[tuple[int, int, int], Choice] = {}
        self._newest: Choice | None = None
        self._version = 0
        self._num_warming = self._num_warmed = 0
        self._num_reports = self._num_drafted = 0
        self._reluctance = _RELUCTANCE[0]

    @property
    def expects_drafts(self) -> bool:
        newest = self._newest
        if self.is_asleep or self.is_exam:
            return self.is_exam
        return newest is None or not (self._guard.is_pausing or newest.plan.is_plain)

    @property
    def is_asleep(self) -> bool:
        return self._sleep.is_asleep

    @property
    def is_exam(self) -> bool:
        return self._sleep.is_exam

    def meets_requests(self, *, has_room: bool) -> bool:
        self._prober.meet_requests()
        return self._sleep.meets_requests(has_room=has_room)

    def plans(self, num_places: int) -> tuple[DraftPlan, ...]:
        return self._menu.plans(num_places)

    def choose(self, load: Load) -> DraftPlan:
        if self.is_exam:
            return self._sleep.plan(load)
        if load.menu is None and self._num_warming < _WARM_UP_CYCLES:
            self._num_warming += 1
            return PLAIN
        self._prober.tick()
        self._guard = self._guards.of(load)
        self._guard.tick()
        choice = self._choice(load)
        self._newest = choice
        plan = self._fit(choice, load)
        if load.menu is not None:
            self._menu.count_cycle(choice.outlook, load)
        if (probe := self._prober.propose(plan, choice.outlook, load)) is not None:
            return probe
        if plan.is_plain:
            return plan
        self._num_drafted += 1
        is_cold = self._num_drafted <= _COLD_CYCLES
        interval = _CYCLES_PER_MEASUREMENT // (2 if load.num_requests <= _FEW_REQUESTS else 1)
        return replace(plan, is_measured=is_cold or self._num_drafted % interval == 0)

    def observe(self, report: CycleReport) -> None:
        if report.load.menu is None and self._num_warmed < _WARM_UP_CYCLES:
            self._num_warmed += 1
            return
        if self.is_asleep or self.is_exam:
            self._observe_sleeping(report)
            return
        self._num_reports += 1
        if not (report.plan.is_probe or report.is_cold or report.is_catching_up):
            self._yields.observe(report, self._planner.rate(report.plan, report.load))
        self._reluctance += (_RELUCTANCE[0] - self._reluctance) / _RELUCTANCE_CYCLES
        if not report.is_cold:
            self._tokens.add(report)
            self._costs.observe(report)
            if report.plan.is_probe:
                self._prober.pay(report, self._usual_rate(report.load))
            self._prober.save(report.cycle_s)
        self._model.observe(report)
        self._sleep.observe(report)
        is_probe = report.plan.is_probe and report.plan.is_measured
        # Captured probes are cheap and come often enough.
        if is_probe and report.load.menu is None and self._model.is_surprised:
            self._prober.follow_up()
        if not (report.plan.is_plain or report.plan.is_probe or report.is_cold):
            guard = self._guards.of(report.load)
            guard.observe(report, self._planner.rate(PLAIN, report.load))
        if self._num_reports < _COLD_CYCLES or self._num_reports % _CYCLES_PER_COMPARISON == 0:
            self._version += 1
            if report.load.menu is not None and not self.expects_drafts:
                self._sleep.judge(report.load)

    def _observe_sleeping(self, report: CycleReport) -> None:
        """Nothing is learned of a head that sleeps, and of one in an exam whether it is of use."""
        if not report.is_cold:
            self._tokens.add(report)
            if self.is_exam:
                self._costs.observe(report)
        self._sleep.observe(report)
        if not (self.is_asleep or self.is_exam):
            # What was known is of another text: judge it as a new one.
            self._model.forget()
            self._guards, self._yields, self._newest = PlainGuards(), YieldCheck(), None
            self._choices.clear()
            self._prober.begin_anew()
            self._reluctance = _RELUCTANCE[0]

    def _usual_rate(self, load: Load) -> float:
        """What the plan in use is expected to yield."""
        plan = PLAIN if self._newest is None else self._fit(self._newest, load)
        return self._planner.rate(plan, load)

    def _fit(self, choice: Choice, load: Load) -> DraftPlan:
        """The chosen plan for this load, or none while there is no reason to trust it."""
        if self._guard.is_pausing:
            return PLAIN
        if load.menu is not None:
            # Captured cycles lose little by drafting as a middling head would want it.
            return choice.plan
        if not self._model.has_observed:
            return PLAIN
        return self._planner.fit(choice.plan, choice.nodes_per_request, load)

    def state(self) -> dict[str, object]:
        choice = self._newest
        is_plain = self._guard.is_pausing or not self._model.has_observed or self.is_asleep
        plan = PLAIN if choice is None or is_plain else choice.plan
        return {
            "controller": "adaptive",
            "plan": plan.shown(),
            "reason": self._reason(),
            "expected_gain": None if choice is None else choice.expected_gain,
            "acceptance": self._model.acceptance(),
            "acceptance_scale": self._model.scale,
            "advantage": self._guard.advantage,
            "cached_token_s": self._costs.cached_token_s,
            "num_probes": self._prober.num_probes,
            **self._sleep.state(),
            **self._tokens.state(),
        }

    def _reason(self) -> str:
        if self.is_asleep or self.is_exam:
            return "drafts were of no use whatever the load; now and then some are tried again"
        if self._newest is None:
            return "nothing decoded yet"
        if self._guard.is_pausing:
            return "drafting was measured to be slower than plain decoding"
        if not self._model.has_observed:
            return "no drafts seen yet"
        if self._newest.outlook.best_drafting is None:
            return "no room for drafts in the pass"
        if self._newest.plan.is_plain:
            return "drafting is expected to be slower than plain decoding"
        return "most tokens per second expected"

    def _choice(self, load: Load) -> Choice:
        key = (
            _bucket(load.num_requests) if load.menu is None else -load.num_places,
            _bucket(load.num_other_tokens),
            _bucket(load.context_tokens),
        )
        known = self._choices.get(key)
        if known is not None and known.version == self._version:
            return known
        if len(self._choices) > 256:
            self._choices.clear()
        choice = self._comparison.choose(
            known or self._newest,
            load,
            believed=self._yields.share(load),
            reluctance=self._reluctance,
            version=self._version,
        )
        if known is not None and choice.plan.is_plain and not known.plan.is_plain:
            self._reluctance = min(2.0 * self._reluctance, _RELUCTANCE[1])
        self._choices[key] = choice
        return choice


def make_controller(
    settings: EngineSettings, times: PassTimes | None, *, max_pass_tokens: int
) -> Controller:
    """The controller the settings ask for; without pass times only the fixed one can work."""
    if settings.controller == "fixed" or times is None:
        return FixedController(settings.tree, max_pass_tokens=max_pass_tokens)
    return AdaptiveController(settings.tree, times, max_pass_tokens=max_pass_tokens)


def _bucket(number: int) -> int:
    """Numbers within about 15% of each other share a bucket."""
    return 0 if number == 0 else 1 + round(math.log(number) / math.log(1.15))
