"""Whether to take up drafting: what it takes to change hands is earned by the tokens that are left.

Catches: drafting that begins for the last tokens of a batch, plans of another batch that are kept
on with although the head is behind, and probes that cost as much where nothing is to be gained.
"""

from dataclasses import replace

import pytest

from fledge.contracts.settings import TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_plan import DraftPlan, Load, Menu
from fledge.engine.menu_planner import MenuPlanner
from fledge.engine.outlook import Planner
from fledge.engine.pass_times import PassCurve, PassTimes
from fledge.engine.plan_comparison import Choice, PlanComparison
from fledge.engine.probing import SHARE, Prober

TREE = TreeSettings(depth=3, width=1, budget=3)
ONE_EACH = DraftPlan(depth=1, width=1, nodes=64)
MENU = Menu((ONE_EACH,), frozenset({ONE_EACH}), capture_s=0.05)
CAUGHT_UP = Load(64, tokens_left=64 * 200, unread=(2,) * 64, num_places=64, menu=MENU)
BEHIND = replace(CAUGHT_UP, unread=(100,) * 64)


def planners(twice_s: float = 0.013) -> tuple[Planner, MenuPlanner, Prober]:
    """64 rows take 10 ms, twice as many so long; the head reads 64,000 tokens in a second."""
    head = PassCurve([1, 64, 6400], [1e-5, 1e-4, 0.1])
    times = PassTimes(PassCurve([1, 64, 128], [0.01, 0.01, twice_s]), head)
    model, costs = AcceptanceModel(TREE), CycleCosts(times)
    planner = Planner(TREE, model, costs, 512)
    menu = MenuPlanner(TREE, costs, planner, 512)
    return planner, menu, Prober(TREE, model, costs, planner)


def choose(load: Load, incumbent: Choice | None = None, twice_s: float = 0.013) -> Choice:
    planner, menu, _ = planners(twice_s)
    comparison = PlanComparison(planner, menu)
    return comparison.choose(incumbent, load, believed=1.0, reluctance=0.025, version=0)


def test_drafting_begins_where_enough_is_left_to_earn_it() -> None:
    assert choose(CAUGHT_UP).expected_gain == pytest.approx(1.17, abs=0.01)
    assert choose(BEHIND).plan == ONE_EACH
    assert choose(replace(BEHIND, tokens_left=64 * 20)).plan.is_plain
    assert choose(replace(CAUGHT_UP, tokens_left=64)).plan == ONE_EACH


def test_nothing_is_asked_of_what_is_left_where_nobody_counts_it() -> None:
    assert choose(replace(BEHIND, tokens_left=None)).plan == ONE_EACH


def test_a_plan_is_kept_until_the_head_is_behind() -> None:
    """It gains 3%: enough to go on, too little to begin."""
    in_use = choose(CAUGHT_UP)
    assert choose(CAUGHT_UP, in_use, twice_s=0.0148).plan == ONE_EACH
    assert choose(BEHIND, in_use, twice_s=0.0148).plan.is_plain


@pytest.mark.parametrize(("twice_s", "hope"), [(0.01, 1.0), (0.015, 0.27), (0.02, 0.0)])
def test_probes_cost_little_where_little_is_to_be_gained(twice_s: float, hope: float) -> None:
    _, menu, prober = planners(twice_s)
    outlook = menu.outlook(CAUGHT_UP)
    assert outlook.hope == pytest.approx(hope, abs=0.02)
    prober.tick()
    prober.propose(ONE_EACH, outlook, CAUGHT_UP)
    prober._saved_s = 0.0
    prober.save(0.01)
    assert prober._saved_s == pytest.approx(max(hope, 0.1) * SHARE * 0.01, rel=0.1)
