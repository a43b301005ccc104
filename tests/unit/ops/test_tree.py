"""Draft trees as arrays against naive walks over lists.

Catches: too few rounds of pointer doubling (deep chains lose their oldest ancestors), padding nodes
that match a token, a child taken for another node's, a reranked tree whose node lost its parent
(a tie between a parent and a child that is certain), nodes out of topological order, and a budget
larger than the number of candidates.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.ops.tree import (
    Candidates,
    ancestors,
    depths,
    is_real,
    match_child,
    root_only,
    select_trees,
)
from tests.unit.ops.random_trees import VOCAB_SIZE, PlainTree, batched, plain_trees

forests = st.lists(plain_trees(max_nodes=16), min_size=1, max_size=3)


@given(forests)
def test_ancestors_are_the_path_to_the_root(trees: list[PlainTree]) -> None:
    batch = batched(trees)
    seen_BNN, depths_BN = ancestors(batch.parents_BN), depths(batch.parents_BN)
    for tree, seen_NN, depths_N in zip(trees, seen_BNN, depths_BN, strict=True):
        for node in range(len(tree.tokens)):
            assert seen_NN[node].nonzero()[:, 0].tolist() == tree.path(node)
            assert depths_N[node] == len(tree.path(node)) - 1


@given(forests)
def test_ancestors_are_closed_and_never_padding(trees: list[PlainTree]) -> None:
    batch = batched(trees)
    seen_BNN = ancestors(batch.parents_BN)
    # Who sees a node sees all that node sees.
    reachable_BNN = (seen_BNN.int() @ seen_BNN.int()) > 0
    assert torch.equal(reachable_BNN, seen_BNN)
    expected = [[node < size for node in range(batch.max_size)] for size in batch.sizes_B.tolist()]
    assert is_real(batch).tolist() == expected
    for tree, seen_NN in zip(trees, seen_BNN, strict=True):
        size = len(tree.tokens)
        assert not seen_NN[:size, size:].any()


def test_chains_of_every_length_see_all_their_ancestors() -> None:
    """Lengths around powers of two are where a round too few would show."""
    for length in range(1, 70):
        parents = torch.tensor([[max(0, i - 1) for i in range(length)]])
        assert torch.equal(ancestors(parents)[0], torch.ones(length, length).tril().bool())


@given(forests, st.data())
def test_match_child_finds_the_child_with_the_token(trees: list[PlainTree], data: st.DataObject):
    # Padding holds a token of the vocabulary and hangs below the root: it must match nothing.
    batch = batched(trees, padding_token=data.draw(st.integers(0, VOCAB_SIZE - 1)))
    nodes = [data.draw(st.integers(0, len(tree.tokens) - 1)) for tree in trees]
    tokens = [data.draw(st.integers(0, VOCAB_SIZE - 1)) for _ in trees]
    got = match_child(batch, is_real(batch), torch.tensor(nodes), torch.tensor(tokens))
    for tree, node, token, child in zip(trees, nodes, tokens, got.tolist(), strict=True):
        matching = [c for c in tree.children(node) if tree.tokens[c] == token]
        assert child == (matching[0] if matching else 0)


def test_the_root_is_nobodys_child() -> None:
    """The root's parent is itself: a root that holds the token must not be found as its child."""
    tree = root_only(torch.tensor([5, 3]))
    real_BN = is_real(tree)
    assert match_child(tree, real_BN, torch.tensor([0, 0]), torch.tensor([5, 3])).tolist() == [0, 0]
    assert tree.sizes_B.tolist() == [1, 1]


@st.composite
def scored_candidates(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Parents (-1 below the root) and scores that never rise; a step of 0 is a certain child."""
    parents: list[int] = []
    scores: list[float] = []
    for i in range(draw(st.integers(1, 25))):
        parent = draw(st.integers(-1, i - 1))
        above = 0.0 if parent < 0 else scores[parent]
        step = draw(st.sampled_from([0.0, 0.0, -0.25, -0.5, -1.0]))
        parents.append(parent)
        scores.append(above + step)
    return parents, scores


@given(st.lists(scored_candidates(), min_size=1, max_size=3), st.integers(1, 30))
def test_selection_keeps_the_best_and_stays_a_tree(
    requests: list[tuple[list[int], list[float]]], budget: int
) -> None:
    count = min(len(parents) for parents, _ in requests)
    requests = [(parents[:count], scores[:count]) for parents, scores in requests]
    tree = select_trees(
        root_tokens_B=torch.tensor([100 + i for i in range(len(requests))]),
        candidates=Candidates(
            # Tokens are the candidates' own numbers, so that they can be recognised afterwards.
            tokens_BC=torch.arange(count).repeat(len(requests), 1),
            scores_BC=torch.tensor([scores for _, scores in requests]),
            logprobs_BC=torch.zeros(len(requests), count),
            parents_BC=torch.tensor([parents for parents, _ in requests]),
        ),
        num_nodes=budget * len(requests),
        max_nodes=budget,
    )
    kept = min(budget, count)
    assert tree.sizes_B.tolist() == [kept + 1] * len(requests)
    assert tree.tokens_BN.shape == tree.parents_BN.shape == (len(requests), kept + 1)
    for i, (parents, scores) in enumerate(requests):
        tokens, new_parents = tree.tokens_BN[i].tolist(), tree.parents_BN[i].tolist()
        assert (tokens[0], new_parents[0]) == (100 + i, 0)
        chosen = tokens[1:]
        assert len(set(chosen)) == kept
        assert sorted(scores[c] for c in chosen) == sorted(scores)[count - kept :]
        for node in range(1, kept + 1):
            assert new_parents[node] < node
            old_parent = parents[tokens[node]]
            assert tokens[new_parents[node]] == (100 + i if old_parent < 0 else old_parent)


def test_a_certain_child_never_pushes_out_its_parent() -> None:
    """A chain of probability 1: all scores are equal, and each budget must keep a prefix of it."""
    count = 40
    for budget in range(1, count + 3):
        tree = select_trees(
            torch.tensor([9]),
            Candidates(
                tokens_BC=torch.arange(count)[None],
                scores_BC=torch.zeros(1, count),
                logprobs_BC=torch.zeros(1, count),
                parents_BC=torch.arange(-1, count - 1)[None],
            ),
            num_nodes=budget,
            max_nodes=budget,
        )
        kept = min(budget, count)
        assert tree.tokens_BN[0].tolist() == [9, *range(kept)]
        assert tree.parents_BN[0].tolist() == [0, *range(kept)]


@given(
    st.lists(scored_candidates(), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(1, 30),
)
def test_selection_spends_the_budget_where_it_pays(
    requests: list[tuple[list[int], list[float]]], num_nodes: int, max_nodes: int
) -> None:
    """The best nodes of the whole batch, closed under parents, however they fall on requests."""
    count = min(len(parents) for parents, _ in requests)
    requests = [(parents[:count], scores[:count]) for parents, scores in requests]
    tree = select_trees(
        torch.full((len(requests),), 100),
        Candidates(
            tokens_BC=torch.arange(count).repeat(len(requests), 1),
            scores_BC=torch.tensor([scores for _, scores in requests]),
            logprobs_BC=-torch.arange(1.0, count + 1).repeat(len(requests), 1),
            parents_BC=torch.tensor([parents for parents, _ in requests]),
        ),
        num_nodes=num_nodes,
        max_nodes=max_nodes,
    )
    best = [sorted(scores, reverse=True)[:max_nodes] for _, scores in requests]
    expected = sorted((score for row in best for score in row), reverse=True)[:num_nodes]
    chosen: list[float] = []
    for i, (parents, scores) in enumerate(requests):
        size = int(tree.sizes_B[i])
        tokens, new_parents = tree.tokens_BN[i].tolist(), tree.parents_BN[i].tolist()
        for node in range(1, size):
            chosen.append(scores[tokens[node]])
            assert tree.logprobs_BN[i, node] == -(tokens[node] + 1)
            assert new_parents[node] < node
            old_parent = parents[tokens[node]]
            assert tokens[new_parents[node]] == (100 if old_parent < 0 else old_parent)
        assert not any(new_parents[size:])
    assert sorted(chosen, reverse=True) == expected


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30), st.integers(1, 8), st.data())
def test_chains_are_cut_as_trees_are_selected(
    num_requests: int, depth: int, num_nodes: int, max_nodes: int, data: st.DataObject
) -> None:
    steps = st.lists(st.sampled_from([0.0, -0.5, -1.0]), min_size=depth, max_size=depth)
    logprobs_BC = torch.tensor([data.draw(steps) for _ in range(num_requests)])
    scores_BC = logprobs_BC.cumsum(dim=1)
    if data.draw(st.booleans()):
        scores_BC[0] = float("-inf")  # a request that is not drafted for
    candidates = Candidates(
        tokens_BC=torch.arange(1, 1 + scores_BC.numel()).view_as(scores_BC),
        scores_BC=scores_BC,
        logprobs_BC=logprobs_BC,
        parents_BC=torch.arange(-1, depth - 1).repeat(num_requests, 1),
    )
    roots_B = torch.arange(90, 90 + num_requests)
    limits = {"num_nodes": num_nodes, "max_nodes": max_nodes}
    wanted = select_trees(roots_B, candidates, **limits)
    chains = select_trees(roots_B, candidates, **limits, is_chain=True)
    assert chains.num_drafts == wanted.num_drafts
    for name in ("tokens_BN", "parents_BN", "sizes_B", "logprobs_BN"):
        found, expected = getattr(chains, name), getattr(wanted, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@given(forests)
def test_a_known_depth_leaves_ancestors_as_they_are(trees: list[PlainTree]) -> None:
    parents_BN = batched(trees).parents_BN
    deepest = int(depths(parents_BN).max())
    for max_depth in (deepest, deepest + 1, 40):
        assert torch.equal(ancestors(parents_BN, max_depth), ancestors(parents_BN))
