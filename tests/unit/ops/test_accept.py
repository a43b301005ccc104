"""Walks down a batch of trees against a plain walk down each tree alone.

Catches: a request that goes on after its neighbours stopped (or stops with them), logits of the
wrong row when trees have unequal sizes, a level's noise at the wrong position, a child of another
node that is accepted, padding that is accepted; for the rejection rule, a token without probability
that is emitted, a rejected token that comes back, and a division by the nothing that is left when
everything was rejected.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.accept import Walk, walk_gumbel, walk_rejection
from fledge.ops.noise import gumbel
from fledge.ops.sampling import make_sampling_batch, process_logits
from tests.unit.ops.random_trees import VOCAB_SIZE, PlainTree, batched, plain_trees

CPU = torch.device("cpu")
RULES = [walk_gumbel, walk_rejection]

params_list = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**63 - 1),
)


@st.composite
def verifications(
    draw: st.DrawFn,
) -> tuple[list[PlainTree], list[SamplingParams], list[int], list[Tensor]]:
    """Trees, parameters, output positions, and the logits of each tree's nodes."""
    trees = draw(st.lists(plain_trees(max_nodes=12), min_size=1, max_size=3))
    params = [draw(params_list) for _ in trees]
    positions = [draw(st.integers(0, 1000)) for _ in trees]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = [2 * torch.randn(len(t.tokens), VOCAB_SIZE, generator=generator) for t in trees]
    return trees, params, positions, logits


def walk_together(
    rule: object,
    trees: list[PlainTree],
    params: list[SamplingParams],
    positions: list[int],
    logits: list[Tensor],
) -> Walk:
    sizes = [len(tree.tokens) for tree in trees]
    first_rows = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
    # Padding has no logits of its own: its rows belong to others or to nobody.
    rows_BN = (first_rows[:, None] + torch.arange(max(sizes))).clamp(max=sum(sizes) - 1)
    return rule(
        torch.cat(logits),
        rows_BN,
        batched(trees),
        make_sampling_batch(params, CPU),
        torch.tensor(positions),
    )


def answers(walk: Walk) -> list[tuple[list[int], list[int]]]:
    """Tokens and nodes of each request, as far as they count."""
    return [
        (tokens[:length], nodes[:length])
        for tokens, nodes, length in zip(
            walk.tokens_BL.tolist(), walk.nodes_BL.tolist(), walk.lengths_B.tolist(), strict=True
        )
    ]


def processed(params: list[SamplingParams], logits_SV: Tensor) -> Tensor:
    """Log-weights of rows that are sampled alike."""
    (rows,) = make_sampling_batch(params, CPU).sampled
    return process_logits(logits_SV, rows)


def naive_gumbel(
    tree: PlainTree, params: SamplingParams, position: int, logits_NV: Tensor
) -> tuple[list[int], list[int]]:
    """One request alone: ask the target for its token, descend while a child holds it."""
    node, tokens, nodes = 0, [], []
    while True:
        scores = logits_NV[node].double()
        if not params.is_greedy:
            scores = processed([params], logits_NV[node][None])[0]
            where = torch.tensor([position + len(tokens)])
            scores = scores + gumbel(torch.tensor([params.seed]), where, VOCAB_SIZE)[0]
        token = int(scores.argmax())
        tokens.append(token)
        nodes.append(node)
        following = [c for c in tree.children(node) if tree.tokens[c] == token]
        if not following:
            return tokens, nodes
        node = following[0]


@given(verifications())
def test_gumbel_walk_equals_the_naive_walk_of_each_request(case: tuple) -> None:
    got = answers(walk_together(walk_gumbel, *case))
    assert got == [naive_gumbel(*one) for one in zip(*case, strict=True)]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60)
@given(case=verifications())
def test_what_is_emitted_is_a_path_from_the_root(rule: object, case: tuple) -> None:
    for tree, (tokens, nodes) in zip(case[0], answers(walk_together(rule, *case)), strict=True):
        assert 1 <= len(tokens) == len(nodes)
        assert nodes == tree.path(nodes[-1])
        assert tokens[:-1] == [tree.tokens[node] for node in nodes[1:]]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60)
@given(case=verifications())
def test_requests_do_not_influence_each_other(rule: object, case: tuple) -> None:
    together = answers(walk_together(rule, *case))
    alone = [
        answers(walk_together(rule, *([part] for part in one)))[0]
        for one in zip(*case, strict=True)
    ]
    assert together == alone


@settings(max_examples=50)
@given(case=verifications())
def test_greedy_requests_walk_alike_under_both_rules(case: tuple) -> None:
    both = [answers(walk_together(rule, *case)) for rule in RULES]
    for params, gumbel_answer, rejection_answer in zip(case[1], *both, strict=True):
        if params.is_greedy:
            assert gumbel_answer == rejection_answer


@pytest.mark.parametrize("rule", RULES)
@given(case=verifications())
def test_impossible_tokens_are_never_emitted(rule: object, case: tuple) -> None:
    """Each emitted token has probability in the processed distribution of the node it came from."""
    trees, params, _, logits = case
    walked = answers(walk_together(rule, *case))
    for tree, one, logits_NV, (tokens, nodes) in zip(trees, params, logits, walked, strict=True):
        del tree
        if one.is_greedy:
            continue
        probs_LV = processed([one] * len(nodes), logits_NV[nodes]).softmax(dim=-1)
        assert bool((probs_LV.gather(1, torch.tensor(tokens)[:, None]) > 0).all())


HOT = SamplingParams(temperature=1.0)


def star(tokens: list[int]) -> PlainTree:
    """A root with these children."""
    return PlainTree([0, *tokens], [0] * (len(tokens) + 1))


def logits_of(probs: list[float]) -> Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probs])


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_a_certain_draft_is_always_accepted(seed: int, position: int) -> None:
    certain = logits_of([0, 0, 0, 1.0, 0, 0, 0])
    anything = torch.zeros(VOCAB_SIZE)
    tree = star([5, 3, 1])
    params = SamplingParams(temperature=1.0, seed=seed)
    rows = torch.stack([certain, anything, anything, anything])
    for rule in RULES:
        tokens, nodes = answers(walk_together(rule, [tree], [params], [position], [rows]))[0]
        assert tokens[0] == 3
        assert nodes == [0, 2]


@settings(max_examples=300)
@given(st.integers(0, 2**63 - 1), st.permutations(range(4)))
def test_all_mass_on_drafts_leaves_nothing_to_divide_by(seed: int, order: list[int]) -> None:
    """Every possible token is drafted: one of them must come out, whatever the coins say."""
    probs = [0.25, 0.25, 0.25, 0.25, 0, 0, 0]
    rows = torch.stack([logits_of(probs)] + [torch.zeros(VOCAB_SIZE)] * 4)
    params = SamplingParams(temperature=1.0, seed=seed)
    walk = walk_together(walk_rejection, [star(order)], [params], [0], [rows])
    tokens, nodes = answers(walk)[0]
    assert tokens[0] < 4
    assert len(nodes) == 2, "a token that is drafted can only be emitted by accepting it"


def test_a_draft_that_loses_its_coin_while_it_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding may leave a coin at or above p(x) = 1 although nothing else has probability."""
    monkeypatch.setattr("fledge.ops.accept.uniform", lambda s, p, n, _: torch.ones(1, n).double())
    certain = logits_of([0, 0, 0, 1.0, 0, 0, 0])
    rows = torch.stack([certain] * 3)
    walk = walk_together(walk_rejection, [star([3, 1])], [HOT], [0], [rows])
    assert answers(walk)[0][0] == [3]


def test_rejected_drafts_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All coins lose: the token comes from what no draft named."""
    monkeypatch.setattr("fledge.ops.accept.uniform", lambda s, p, n, _: torch.ones(1, n).double())
    rows = torch.stack([logits_of([0.3, 0.3, 0.3, 0.05, 0.05, 0, 0])] * 4)
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed)
        walk = walk_together(walk_rejection, [star([0, 1, 2])], [params], [0], [rows])
        tokens, nodes = answers(walk)[0]
        assert nodes == [0]
        assert tokens[0] in (3, 4)


def test_both_rules_accept_with_the_probability_of_the_children() -> None:
    """eagle3.md 1.10: the mass of the drafted children, here 0.45; 4 sigma of 4000 draws."""
    probs = [0.1, 0.2, 0.3, 0.15, 0.05, 0.15, 0.05]
    count = 4000
    rows = torch.stack([logits_of(probs)] + [torch.zeros(VOCAB_SIZE)] * 3)
    trees = [star([2, 0, 4])] * count
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(count)]
    for rule in RULES:
        walk = walk_together(rule, trees, params, [0] * count, [rows] * count)
        share = float((walk.lengths_B > 1).double().mean())
        assert share == pytest.approx(0.45, abs=4 * math.sqrt(0.45 * 0.55 / count))
