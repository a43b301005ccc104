"""How far chains are drafted: as far as they pay, and next to never where they do not."""

import random

import pytest

from fledge.contracts.settings import TreeSettings
from fledge.engine.chain_estimates import ChainOutcome, Trust
from fledge.engine.chain_planner import (
    AdaptiveChains,
    make_chains,
    path_probabilities,
)
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.pass_times import PassCurve, PassTimes

FIRST_ROW_S, ROW_S, STEP_S, OTHER_S = 5.5e-3, 1.2e-3, 0.3e-3, 0.2e-3


TIMES = PassTimes(PassCurve([1, 4], [5e-3, 8e-3]), PassCurve([1], [3e-4]))


def report_of(*, num_drafts: int) -> CycleReport:
    """Of which none was right: a row takes 1 ms, the first of a pass 6."""
    return CycleReport(
        plan=DraftPlan(6, 1, num_drafts) if num_drafts else PLAIN,
        load=Load(num_requests=1),
        target_s=6e-3 + 1e-3 * num_drafts,
        draft_s=0.0,
        other_s=0.0,
        emitted=1,
    )


class Machine:
    """Cycles of one request whose head says one probability and is right with another."""

    def __init__(
        self, said: float, right: float, depth: int = 6, *, is_copied: bool = False
    ) -> None:
        self.said, self.right, self.is_copied = said, right, is_copied
        self.planner, self.random = AdaptiveChains(depth), random.Random(0)
        self.num_tokens = 0
        self.seconds = 0.0
        self.slowness = 1.0
        self.lengths: list[int] = []

    def run(self, num_cycles: int) -> None:
        for _ in range(num_cycles):
            self._cycle()

    def _cycle(self) -> None:
        plan = self.planner.choose()
        num_levels = count = 0
        path = 1.0
        while num_levels < plan.depth and (num_levels == 0 or path >= plan.least_drafted):
            path *= self.said
            num_levels += 1
            count += path >= (plan.least_copied if self.is_copied else plan.least_verified)
        accepted = 0
        while accepted < count and self.random.random() < self.right:
            accepted += 1
        target_s, draft_s = FIRST_ROW_S + ROW_S * (1 + count), STEP_S * num_levels
        report = CycleReport(
            plan=DraftPlan(plan.depth, 1, count) if plan.depth else PLAIN,
            load=Load(num_requests=1),
            target_s=target_s * self.slowness,
            draft_s=draft_s * self.slowness,
            other_s=OTHER_S * self.slowness,
            emitted=1 + accepted,
        )
        paths = path_probabilities([self.said] * count)
        outcome = ChainOutcome(paths, accepted, is_copied=self.is_copied)
        self.planner.observe(report, num_levels, [outcome])
        self.num_tokens += 1 + accepted
        self.seconds += report.cycle_s / self.slowness
        self.lengths.append(count)

    @property
    def speed_up(self) -> float:
        return self.num_tokens * (FIRST_ROW_S + ROW_S + OTHER_S) / self.seconds


@pytest.mark.parametrize("said", [0.2, 0.5, 0.95])
def test_what_is_never_right_costs_next_to_nothing(said: float) -> None:
    machine = Machine(said, right=0.0)
    machine.run(1500)
    assert machine.speed_up > 0.98


def test_what_is_often_right_is_drafted_far() -> None:
    machine = Machine(0.9, right=0.9)
    machine.run(400)
    assert machine.speed_up > 1.9
    assert sum(machine.lengths[-50:]) > 200


def test_what_is_half_right_is_drafted_a_little() -> None:
    machine = Machine(0.55, right=0.55)
    machine.run(1500)
    assert machine.speed_up > 1.05
    assert 0 < sum(machine.lengths) / len(machine.lengths) < 3


def test_a_head_that_doubts_itself_is_believed_when_it_is_right() -> None:
    machine = Machine(0.5, right=0.9)
    machine.run(1000)
    assert machine.speed_up > 1.6


def test_a_modest_head_is_believed_from_the_start() -> None:
    # Where a row takes 0.4 of what a token takes, drafts of 0.3 are verified, and so learned of.
    modest, exact = Trust(is_modest=True), Trust()
    assert modest.least_for(0.4) < 0.3 < exact.least_for(0.4)
    for trust in (modest, exact):
        trust.add([ChainOutcome((0.25,), 0)] * 60)
        assert trust.shares()[2] < 0.05


def test_drafting_begins_again_when_it_pays() -> None:
    machine = Machine(0.6, right=0.0)
    machine.run(300)
    assert sum(machine.lengths[-50:]) < 10
    machine.said = machine.right = 0.95
    machine.run(600)
    assert sum(machine.lengths[-50:]) > 150


def test_a_new_request_is_tried_at_once() -> None:
    machine = Machine(0.6, right=0.0)
    machine.run(300)
    machine.said = machine.right = 0.95
    machine.planner.begin()
    machine.run(40)
    assert sum(machine.lengths[-40:]) > 120


def test_a_request_that_was_drafted_for_long_is_not_new() -> None:
    found = []
    for is_told in (True, False):
        machine = Machine(0.95, right=0.95)
        machine.run(20)
        if is_told:
            machine.planner.begin()
        machine.run(100)
        machine.right = 0.0
        machine.run(200)
        found.append(machine.lengths)
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_new_request_may_begin_badly_after_a_hard_one(seed: int) -> None:
    """What the text before it was like is no reason to give it up."""
    machine = Machine(0.35, right=0.35)
    machine.planner, machine.random = AdaptiveChains(6, TIMES), random.Random(seed)
    machine.run(120)
    machine.planner.begin()
    machine.said = machine.right = 0.4
    machine.run(12)
    machine.said = machine.right = 0.9
    machine.run(40)
    assert sum(machine.lengths[-20:]) > 60


@pytest.mark.parametrize(("num_requests", "num_cycles"), [(30, 64), (100, 16)])
def test_trying_new_requests_that_are_never_right_costs_little(
    num_requests: int, num_cycles: int
) -> None:
    """Less with each of them."""
    machine = Machine(0.6, right=0.0)
    for _ in range(num_requests):
        machine.planner.begin()
        machine.run(num_cycles)
    assert machine.speed_up > 0.95


@pytest.mark.parametrize("slowness", [1.0, 200.0])
def test_slow_targets_find_back_after_many_hard_requests(slowness: float) -> None:
    """However long a cycle takes that drafts in vain."""
    machine = Machine(0.6, right=0.0)
    machine.slowness = slowness
    for _ in range(12):
        machine.planner.begin()
        machine.run(64)
    machine.said = machine.right = 0.9
    for _ in range(30):
        machine.planner.begin()
        machine.run(64)
    assert sum(machine.lengths[-64:]) > 150


def test_what_pays_again_is_believed_in_again() -> None:
    machine = Machine(0.6, right=0.0)
    machine.planner.begin()
    machine.run(64)
    assert machine.planner._num_given_up == 1
    machine.said = machine.right = 0.9
    machine.planner.begin()
    machine.run(64)
    assert machine.planner._num_given_up == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("right", "least"), [(0.7, 1.45), (0.1, 0.96)])
def test_others_on_the_same_cores_do_not_change_how_drafting_looks(
    right: float, least: float, seed: int
) -> None:
    machine = Machine(0.7, right=right)
    others = random.Random(seed)
    machine.run(40)
    for _ in range(30):
        machine.slowness = others.choice([1.0, 1.3, 2.5])
        machine.run(others.randint(5, 60))
    assert machine.speed_up > least


def test_an_interruption_says_nothing_of_rows() -> None:
    machine = Machine(0.8, right=0.8)
    machine.run(100)
    before = machine.planner.state()["chains"]["row_s"]
    machine.slowness = 30.0
    machine.run(1)
    machine.slowness = 1.0
    machine.run(3)
    after = machine.planner.state()["chains"]["row_s"]
    assert after == pytest.approx(before, rel=0.1)


def test_copies_are_judged_apart_from_the_head() -> None:
    copies, own = Machine(0.9, right=0.35, is_copied=True), Machine(0.9, right=0.35)
    for machine in (copies, own):
        machine.run(300)
    of_copies, of_own = (machine.planner.state()["chains"] for machine in (copies, own))
    assert of_copies["acceptance_at_probability"] == AdaptiveChains(6)._trust.shares()
    assert of_own["acceptance_of_copies"] == AdaptiveChains(6)._trust_in_copies.shares()
    assert of_copies["acceptance_of_copies"][9] < 0.6
    assert of_own["acceptance_at_probability"][9] < 0.6
    plan = copies.planner._plan()
    assert plan.least_copied > 0.5 > plan.least_verified


def test_what_is_known_of_a_head_outlasts_copies() -> None:
    machine = Machine(0.9, right=0.35)
    machine.run(300)
    known = machine.planner._trust.shares()
    machine.is_copied = True
    machine.run(600)
    assert machine.planner._trust.shares() == known


def test_who_plans() -> None:
    chain, tree = TreeSettings(depth=5, width=1, budget=3), TreeSettings()
    adaptive = make_chains(tree, TIMES)
    assert adaptive is not None
    assert isinstance(adaptive.greedy, AdaptiveChains)
    assert set(adaptive.state()) == {"chains", "sampled_chains"}
    assert make_chains(tree, None) is None
    fixed = make_chains(chain, None)
    assert fixed is not None
    assert fixed.greedy.choose().depth == fixed.sampled.choose().depth == 3
    assert fixed.state() == {}
    assert path_probabilities([0.5, float("nan"), 0.9]) == [0.5, 0.0, 0.0]


def test_times_of_nothing_are_no_reason_to_fail() -> None:
    """As a coarse clock has them."""
    planner = AdaptiveChains(5)
    for nodes in (0, 0, 0, 3, 5, 0):
        report = CycleReport(
            plan=DraftPlan(5, 1, nodes) if nodes else PLAIN,
            load=Load(num_requests=1),
            target_s=0.0,
            draft_s=0.0,
            other_s=0.0,
            emitted=1,
        )
        planner.observe(report, nodes, [ChainOutcome((0.5,) * nodes, 0)] if nodes else [])
        assert planner.choose().depth >= 0


def test_measured_times_are_believed_until_cycles_have_shown_better() -> None:
    planner = AdaptiveChains(6, TIMES)
    for _ in range(3):
        planner.choose()
        planner.observe(report_of(num_drafts=0), 0, [])
    # A row takes 1 of the 3.6 ms that a token is hoped to take: improbable chains are left out.
    hoped = Trust(is_modest=True).least_for(1.0 / 3.6)
    assert planner.choose().least_verified == pytest.approx(hoped)
    assert AdaptiveChains(6).choose().least_verified == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_beginning_is_no_reason_to_give_up(seed: int) -> None:
    machine = Machine(0.8, right=0.65)
    machine.planner, machine.random = AdaptiveChains(6, TIMES), random.Random(seed)
    machine.run(12)
    machine.right = 0.9
    machine.run(60)
    assert sum(machine.lengths[-40:]) > 100


def test_where_drafts_lose_a_token_is_worth_what_it_takes_without() -> None:
    planner = AdaptiveChains(6, TIMES)
    for num_drafts in (0, 0, 0, 6, 5, 6, 4, 6):
        planner.choose()
        planner.observe(report_of(num_drafts=num_drafts), num_drafts, [])
    # Tokens of these cycles took 12 ms, and a row 1; without drafts they take 6.
    assert planner._plan().least_verified == pytest.approx(
        Trust(is_modest=True).least_for(1.0 / 6.0), abs=0.02
    )
