"""The controller against every fixed setting, on machines, heads and loads made of numbers.

Catches a controller that settles on a worse setting, that loses to plain decoding, that does not
notice when the load or the drafter changes, or that believes a drafter which misjudges itself. The
larger grid of `tools/measure_controller.py` asks the same of more loads and seeds.
"""

from functools import lru_cache

import pytest
import torch

from fledge.engine.calibration import Calibration
from fledge.engine.controller import AdaptiveController, FixedController
from fledge.ops.tree import select_trees
from tests.unit.engine.controller_simulation import Run, best_fixed
from tests.unit.engine.simulated_machines import MACHINES, MAX_PASS_TOKENS, Machine
from tests.unit.engine.simulated_trees import (
    ACCURACIES,
    TREE,
    LiveTrees,
    TreeBank,
    grow_forest,
    walk_forest,
)

# About fifteen seconds that `test_controller.py` mostly covers in two.
pytestmark = pytest.mark.slow

POOR, MIDDLING, GOOD, SAMPLED, MIXED = ACCURACIES
CHEAP_HEAD, DEAR_HEAD, LAUNCH_BOUND, CPU_OFFSET, LINEAR, _ = MACHINES
WARM_UP = 120

bank = lru_cache(maxsize=None)(TreeBank)


def machine_id(machine: Machine) -> str:
    return machine.name


def adaptive(machine: Machine, *, seed: int = 0) -> Run:
    """A run whose pass times were measured with errors of a few per cent."""
    times = machine.pass_times(0.05, seed)
    return Run(machine, AdaptiveController(TREE, times, max_pass_tokens=MAX_PASS_TOKENS), seed=seed)


@pytest.mark.parametrize("num_requests", [1, 8, 64, 256])
@pytest.mark.parametrize("machine", MACHINES[:5], ids=machine_id)
def test_near_the_best_setting_and_never_under_plain(machine: Machine, num_requests: int) -> None:
    for accuracy in (POOR, MIDDLING, GOOD):
        trees = bank(accuracy, num_requests)
        best = best_fixed(machine, trees)
        run = adaptive(machine)
        run.cycles(trees, 450)
        assert run.rate(WARM_UP) > 0.95 * best.rate, f"{accuracy.name}: {best.plan}"
        assert run.rate() > 0.98 * best.plain_rate, accuracy.name


@pytest.mark.parametrize("accuracy", [SAMPLED, MIXED], ids=lambda accuracy: accuracy.name)
def test_other_kinds_of_requests(accuracy: object) -> None:
    for machine in (CHEAP_HEAD, CPU_OFFSET):
        trees = bank(accuracy, 32)
        best = best_fixed(machine, trees)
        run = adaptive(machine)
        run.cycles(trees, 450)
        assert run.rate(WARM_UP) > 0.95 * best.rate
        assert run.rate() > 0.98 * best.plain_rate


def test_a_fixed_setting_fails_the_same_check() -> None:
    """At load the tree that is best alone is far worse than no drafts at all."""
    trees = bank(POOR, 64)
    run = Run(LINEAR, FixedController(TREE, max_pass_tokens=MAX_PASS_TOKENS))
    run.cycles(trees, 50)
    assert run.rate() < 0.5 * best_fixed(LINEAR, trees).plain_rate


def test_probes_cost_less_than_a_hundredth_of_the_time() -> None:
    trees = bank(POOR, 64)
    run = adaptive(LINEAR)
    run.cycles(trees, 1000)
    plain_rate = best_fixed(LINEAR, trees).plain_rate
    cycles = zip(run.plans, run.tokens, run.seconds, strict=True)
    lost_s = sum(s - tokens / plain_rate for plan, tokens, s in cycles if plan.is_probe)
    assert any(plan.is_probe for plan in run.plans[500:])
    assert lost_s < 0.01 * sum(run.seconds)


@pytest.mark.parametrize(
    ("machine", "before", "after", "num_requests"),
    [
        (CHEAP_HEAD, POOR, GOOD, 8),
        (CHEAP_HEAD, GOOD, POOR, 8),
        (CPU_OFFSET, POOR, GOOD, 8),
        (CPU_OFFSET, GOOD, POOR, 8),
        (DEAR_HEAD, GOOD, POOR, 1),
        (LAUNCH_BOUND, GOOD, POOR, 64),
    ],
)
def test_a_drafter_that_changes_is_noticed(
    machine: Machine, before: object, after: object, num_requests: int
) -> None:
    run = adaptive(machine)
    run.cycles(bank(before, num_requests), 300)
    run.cycles(bank(after, num_requests), 300)
    best = best_fixed(machine, bank(after, num_requests))
    assert run.rate(400) > 0.93 * best.rate


def test_a_load_that_changes_is_followed_at_once() -> None:
    run = adaptive(CHEAP_HEAD)
    for start, num_requests in ((0, 1), (200, 256), (400, 8)):
        run.cycles(bank(MIDDLING, num_requests), 200)
        best = best_fixed(CHEAP_HEAD, bank(MIDDLING, num_requests))
        assert run.rate(start + 20) > 0.93 * best.rate, num_requests


def test_a_drafter_that_promises_too_much_is_calibrated() -> None:
    """Without calibration requests are compared by promises, and the best nodes are missed."""
    rates = {}
    for is_calibrated in (True, False):
        calibration = Calibration(TREE.depth, torch.device("cpu")) if is_calibrated else None
        trees = LiveTrees(MIXED, 16, confidence=0.4, calibration=calibration)
        run = adaptive(CHEAP_HEAD)
        run.cycles(trees, 200)
        rates[is_calibrated] = run.rate(100) / best_fixed(CHEAP_HEAD, bank(MIXED, 16)).rate
    assert rates[True] > 0.95
    assert rates[False] < rates[True] - 0.02


def test_worthless_drafts_cost_next_to_nothing() -> None:
    calibration = Calibration(TREE.depth, torch.device("cpu"))
    trees = LiveTrees(POOR, 16, confidence=0.1, calibration=calibration)
    run = adaptive(LINEAR)
    run.cycles(trees, 300)
    assert run.rate() > 0.98 * best_fixed(LINEAR, bank(POOR, 16)).plain_rate


def test_a_budget_for_the_batch_beats_equal_shares() -> None:
    """Same number of nodes in the pass: those most likely anywhere, or as many for each request."""
    num_requests, share = 24, 3
    trees = LiveTrees(MIXED, num_requests, confidence=1.0)
    gained = []
    for _ in range(80):
        forest = grow_forest(trees._accuracy_B, MIXED.spread, TREE, trees._random)
        accepted = {}
        for name, max_nodes in (("batch", TREE.budget), ("equal", share)):
            tree = select_trees(
                torch.zeros(num_requests, dtype=torch.long),
                forest.candidates,
                num_nodes=share * num_requests,
                max_nodes=max_nodes,
            )
            assert tree.num_drafts == share * num_requests
            walk, _, _ = walk_forest(tree, forest)
            accepted[name] = int(walk.lengths_B.sum())
        gained.append(accepted["batch"] - accepted["equal"])
    mean = torch.tensor(gained, dtype=torch.float).mean()
    error = torch.tensor(gained, dtype=torch.float).std() / len(gained) ** 0.5
    assert mean > 5 * error
    assert mean / (num_requests * 2) > 0.05
