"""Draft scores become acceptance probabilities, per depth and sampling mode.

Catches a map that is not the drafter's own belief at the start, that falls where its input rises,
that lifts a child above its parent, that mixes up depths or sampling modes, that counts padding or
nodes nobody looked at, and one that does not follow a drafter that changes.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fledge.engine.calibration import Calibration
from fledge.engine.draft_plan import DraftPlan
from fledge.ops.accept import Walk
from fledge.ops.tree import TreeBatch
from tests.unit.engine.simulated_trees import ACCURACIES, LiveTrees

CPU = torch.device("cpu")
GREEDY, SAMPLED = torch.tensor([False]), torch.tensor([True])


def mapped(calibration: Calibration, prob: float, depth: int, sampled_B: Tensor = GREEDY) -> float:
    logprobs = torch.tensor([[prob]]).log()
    return float(calibration.apply(logprobs, depth, sampled_B).exp())


def walk_of(nodes: list[list[int]], lengths: list[int], failed: list[bool] | None = None) -> Walk:
    nodes_BL = torch.tensor(nodes)
    return Walk(
        tokens_BL=torch.zeros_like(nodes_BL),
        nodes_BL=nodes_BL,
        lengths_B=torch.tensor(lengths),
        failed_B=torch.tensor(failed or [False] * len(lengths)),
        logprobs=None,
    )


def chain_batch(num_requests: int, prob: float) -> TreeBatch:
    """Chains of two drafts that the drafter gives the same probability."""
    log = float(np.log(prob))
    return TreeBatch(
        tokens_BN=torch.arange(3).repeat(num_requests, 1),
        parents_BN=torch.tensor([[0, 0, 1]]).repeat(num_requests, 1),
        sizes_B=torch.full((num_requests,), 3),
        logprobs_BN=torch.tensor([[0.0, log, log]]).repeat(num_requests, 1),
        num_drafts=2 * num_requests,
    )


def teach(
    calibration: Calibration, prob: float, rates: tuple[float, float], sampled: bool = False
) -> None:
    """A thousand chains whose first and second draft are accepted at these rates."""
    count = 1000
    first, second = round(count * rates[0]), round(count * rates[0] * rates[1])
    lengths = [3] * second + [2] * (first - second) + [1] * (count - first)
    walk = walk_of([[0, 1, 2]] * count, lengths)
    sampled_B = torch.full((count,), sampled)
    for _ in range(4):
        calibration.observe(chain_batch(count, prob), walk, sampled_B)
        calibration.refresh()


@pytest.mark.parametrize("depth", [1, 3, 9])
@pytest.mark.parametrize("sampled_B", [GREEDY, SAMPLED])
def test_at_the_start_the_drafter_is_believed(depth: int, sampled_B: Tensor) -> None:
    calibration = Calibration(3, CPU)
    for prob in (0.0005, 0.03, 0.3, 0.6, 0.9, 0.99):
        assert mapped(calibration, prob, depth, sampled_B) == pytest.approx(prob, rel=0.03)
    assert 0.98 < mapped(calibration, 1.0, depth, sampled_B) < 1.0


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 5)])
def test_maps_rise_stay_below_one_and_keep_their_shape(shape: tuple[int, ...]) -> None:
    calibration = Calibration(3, CPU)
    live = LiveTrees(ACCURACIES[4], 8, confidence=0.4, calibration=calibration, num_sampled=3)
    for _ in range(64):
        live.outcome(DraftPlan(depth=3, width=4, nodes=64), 0)
    logprobs = torch.randn(shape).abs().neg()
    assert calibration.apply(logprobs, 2, torch.tensor([True, False])).shape == shape
    rising = torch.cat([torch.tensor([-torch.inf, -40.0]), torch.linspace(-12, 0, 4001)])
    for depth in (1, 2, 3, 7):
        for sampled_B in (GREEDY, SAMPLED):
            out = calibration.apply(rising[None], depth, sampled_B)[0]
            assert out[0] == -torch.inf
            assert out[1:].isfinite().all()
            assert (out <= 0).all()
            assert (out.diff()[1:] >= -1e-5).all()


def test_each_depth_and_mode_learns_its_own_rate() -> None:
    calibration = Calibration(3, CPU)
    teach(calibration, 0.67, (0.4, 0.8))
    assert mapped(calibration, 0.67, 1) == pytest.approx(0.4, abs=0.03)
    assert mapped(calibration, 0.67, 2) == pytest.approx(0.8, abs=0.03)
    assert mapped(calibration, 0.67, 1, SAMPLED) == pytest.approx(0.67, rel=0.03)
    teach(calibration, 0.67, (0.2, 0.5), sampled=True)
    assert mapped(calibration, 0.67, 1, SAMPLED) == pytest.approx(0.2, abs=0.03)
    assert mapped(calibration, 0.67, 1) == pytest.approx(0.4, abs=0.03)


def test_a_depth_not_seen_yet_goes_by_the_others() -> None:
    calibration = Calibration(4, CPU)
    teach(calibration, 0.67, (0.3, 0.3))
    assert mapped(calibration, 0.67, 4) < 0.45


def test_a_little_evidence_moves_the_maps_a_little() -> None:
    calibration = Calibration(2, CPU)
    calibration.observe(chain_batch(1, 0.67), walk_of([[0, 0, 0]], [1]), GREEDY)
    calibration.refresh()
    assert 0.5 < mapped(calibration, 0.67, 1) < 0.66


def test_what_is_counted() -> None:
    """Children of visited nodes only: not the root, not padding, not deeper ones, not failures."""
    tree = TreeBatch(
        tokens_BN=torch.arange(6).repeat(2, 1),
        #   0 -> 1 -> 3, 0 -> 2 -> 4; node 5 is padding
        parents_BN=torch.tensor([[0, 0, 0, 1, 2, 0]] * 2),
        sizes_B=torch.tensor([5, 5]),
        logprobs_BN=torch.zeros(2, 6),
        num_drafts=8,
    )
    calibration = Calibration(3, CPU)
    walk = walk_of([[0, 1, 1], [0, 2, 4]], [2, 3], [False, True])
    calibration.observe(tree, walk, torch.tensor([False, True]))
    nothing = [0.0, 0.0, 0.0]
    tried_MD, accepted_MD = calibration._counts_2X.view(2, 4, 3, -1).sum(dim=3).tolist()
    assert tried_MD == [[2.0, 1.0, 0.0], nothing, nothing, nothing]
    assert accepted_MD == [[1.0, 0.0, 0.0], nothing, nothing, nothing]


def test_copies_are_counted_apart() -> None:
    """What is copied says nothing of a head, and the other way round."""
    calibration = Calibration(2, CPU)
    before = mapped(calibration, 0.83, 1)
    count = 40
    copied = replace(chain_batch(count, 0.83), is_copied_B=torch.ones(count, dtype=torch.bool))
    walk = walk_of([[0, 1, 2]] * count, [3] * count)
    calibration.observe(copied, walk, torch.zeros(count, dtype=torch.bool))
    calibration.refresh()
    assert not calibration.is_settled
    assert mapped(calibration, 0.83, 1) == before
    knots_K, lines_MD2S = calibration.depth_maps
    assert (lines_MD2S[0] == lines_MD2S[1]).all()
    assert not (lines_MD2S[0] == lines_MD2S[2]).all()
    assert len(knots_K) + 1 == lines_MD2S.shape[3]


def test_nothing_seen_changes_nothing() -> None:
    calibration = Calibration(2, CPU)
    before = calibration.table()
    calibration.refresh()
    plain = TreeBatch(
        tokens_BN=torch.zeros(1, 1, dtype=torch.long),
        parents_BN=torch.zeros(1, 1, dtype=torch.long),
        sizes_B=torch.ones(1, dtype=torch.long),
        logprobs_BN=torch.zeros(1, 1),
        num_drafts=0,
    )
    calibration.observe(plain, walk_of([[0]], [1]), GREEDY)
    calibration.refresh()
    assert (calibration.table() == before).all()


@pytest.mark.parametrize("confidence", [0.4, 2.0])
def test_a_drafter_that_misjudges_itself_is_put_right(confidence: float) -> None:
    calibration = Calibration(3, CPU)
    live = LiveTrees(ACCURACIES[1], 32, confidence=confidence, calibration=calibration)
    errors = {}
    for num_cycles in (0, 64):
        for _ in range(num_cycles):
            live.outcome(DraftPlan(depth=3, width=4, nodes=256), 0)
        true = torch.linspace(0.1, 0.95, 18)
        believed = (confidence * true.log())[None]
        errors[num_cycles] = max(
            float((calibration.apply(believed, depth, GREEDY)[0].exp() - true).abs().max())
            for depth in (1, 2, 3)
        )
    assert errors[0] > 0.2  # without what was observed the same check fails
    assert errors[64] < 0.08


def test_a_drafter_that_changes_is_followed() -> None:
    calibration = Calibration(3, CPU)
    live = LiveTrees(ACCURACIES[1], 32, confidence=1.0, calibration=calibration)
    for confidence, believed, expected in ((1.0, 0.7, 0.7), (0.4, 0.7, 0.7**2.5)):
        live.confidence = confidence
        for _ in range(160):
            live.outcome(DraftPlan(depth=2, width=4, nodes=256), 0)
        assert mapped(calibration, believed, 1) == pytest.approx(expected, abs=0.06)
