"""Walks by coins: they accept as often as they are told to, and earn less with less drafted."""

import pytest
import torch

from fledge.contracts.errors import ConfigError
from fledge.contracts.sampling import SamplingParams
from fledge.ops.sampling import make_sampling_batch
from fledge.ops.synthetic_walk import SyntheticWalk
from fledge.ops.tree import TreeBatch

NUM_REQUESTS = 4000


def walk_of(parents: list[int], depth: int, rule: SyntheticWalk) -> torch.Tensor:
    """Accept lengths of many walks down the same tree."""
    size = len(parents)
    tree = TreeBatch(
        tokens_BN=torch.arange(size).repeat(NUM_REQUESTS, 1),
        parents_BN=torch.tensor(parents).repeat(NUM_REQUESTS, 1),
        sizes_B=torch.full((NUM_REQUESTS,), size),
        logprobs_BN=torch.zeros(NUM_REQUESTS, size),
        num_drafts=NUM_REQUESTS * (size - 1),
        max_depth=depth,
    )
    params = [SamplingParams(seed=seed) for seed in range(NUM_REQUESTS)]
    batch = make_sampling_batch(params, torch.device("cpu"))
    logits = torch.zeros(1, 5)
    rows = torch.zeros(NUM_REQUESTS, size, dtype=torch.long)
    positions = torch.arange(NUM_REQUESTS) % 7
    walk = rule(logits, rows, tree, batch, positions, max_depth=depth)
    for place in range(20):
        length = int(walk.lengths_B[place])
        path = walk.nodes_BL[place, :length].tolist()
        assert all(parents[node] == above for above, node in zip(path, path[1:], strict=False))
        assert walk.tokens_BL[place, : length - 1].tolist() == path[1:]
    return walk.lengths_B.double()


def test_a_chain_accepts_as_often_as_told() -> None:
    lengths = walk_of([0, 0, 1, 2, 3, 4], 5, SyntheticWalk(0.777))
    expected = sum(0.777**depth for depth in range(6))
    assert float(lengths.mean()) == pytest.approx(expected, abs=0.1)


def test_siblings_add_what_is_stated() -> None:
    alone = walk_of([0, 0], 1, SyntheticWalk(0.5, sibling=0.3))
    three = walk_of([0, 0, 0, 0], 1, SyntheticWalk(0.5, sibling=0.3))
    assert float(alone.mean()) == pytest.approx(1.5, abs=0.03)
    assert float(three.mean()) == pytest.approx(2 - 0.5 * 0.7 * 0.7, abs=0.03)
    assert torch.all(walk_of([0, 0, 1, 1], 2, SyntheticWalk(0.0)) == 1)


def test_every_depth_has_its_own_chance() -> None:
    rule = SyntheticWalk((0.9, 0.5, 0.2), sibling=0.4)
    chain = walk_of([0, 0, 1, 2, 3], 4, rule)
    reached = [0.9, 0.9 * 0.5, 0.9 * 0.5 * 0.2, 0.9 * 0.5 * 0.2 * 0.2]
    for depth, chance in enumerate(reached, start=1):
        assert float((chain > depth).double().mean()) == pytest.approx(chance, abs=0.03)
    # Two children of the root, and two below the first of them.
    tree = walk_of([0, 0, 0, 1, 1], 2, rule)
    assert float((tree > 1).double().mean()) == pytest.approx(1 - 0.1 * 0.6, abs=0.03)
    assert float((tree > 2).double().mean()) == pytest.approx(0.9 * (1 - 0.5 * 0.6), abs=0.03)


def test_one_chance_for_each_depth_is_the_same_as_one_for_all() -> None:
    parents = [0, 0, 0, 1, 1, 3, 3]
    once, each = SyntheticWalk(0.6, sibling=0.3), SyntheticWalk((0.6, 0.6, 0.6), sibling=0.3)
    assert torch.equal(walk_of(parents, 3, once), walk_of(parents, 3, each))


def test_chances_are_chances() -> None:
    with pytest.raises(ConfigError, match="the chances first are none; give one a depth"):
        SyntheticWalk(())
    with pytest.raises(ConfigError, match="the chance first is -1"):
        SyntheticWalk((0.5, -1))
    with pytest.raises(ConfigError, match="the chance sibling is 2"):
        SyntheticWalk(0.5, sibling=2)
    with pytest.raises(ConfigError, match=r"first is 1.5; it must be between 0 and 1"):
        SyntheticWalk(1.5)
