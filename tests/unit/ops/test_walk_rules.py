"""Walks with rules, with logprobs, and with logits that are no numbers.

Catches: rules judged on another node's path or at another position, counts that keep what a stopped
request was shown, logprobs of the wrong node or of the processed logits, a request with NaN logits
that changes its neighbours' tokens, a NaN at a node nobody visited that fails a request.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.accept import Walk, walk_gumbel, walk_rejection
from fledge.ops.logit_rules import RequestRules, TokenCounts, make_rules
from fledge.ops.logprobs import read_logprobs
from fledge.ops.sampling import make_sampling_batch
from tests.unit.ops.random_trees import VOCAB_SIZE, PlainTree, batched, plain_trees

CPU = torch.device("cpu")
RULES = [walk_gumbel, walk_rejection]
EOS = frozenset({2})
PROMPT = [1, 5]
NAN = float("nan")

Rule = Callable[..., Walk]
Case = tuple[list[PlainTree], list[SamplingParams], list[list[int]], list[Tensor]]

params_list = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-3, 3), max_size=2),
    repetition_penalty=st.sampled_from([None, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.9]),
    min_tokens=st.integers(0, 6),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 2**40),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees, parameters, what was said before, and the logits of each tree's nodes."""
    trees = draw(st.lists(plain_trees(max_nodes=10), min_size=1, max_size=3))
    params = [draw(params_list) for _ in trees]
    said = [draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)) for _ in trees]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = [2 * torch.randn(len(t.tokens), VOCAB_SIZE, generator=generator) for t in trees]
    # Some nodes want their child, so that walks go deep.
    for tree, rows in zip(trees, logits, strict=True):
        for node in range(len(tree.tokens)):
            if children := tree.children(node):
                rows[node, tree.tokens[children[0]]] += 2.0
    return trees, params, said, logits


def walk(rule: Rule, case: Case, max_depth: int | None = None) -> Walk:
    trees, params, said, logits = case
    counts = TokenCounts(VOCAB_SIZE, CPU)
    requests = [
        RequestRules(one, PROMPT, output, EOS, counts)
        for one, output in zip(params, said, strict=True)
    ]
    sizes = [len(tree.tokens) for tree in trees]
    starts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
    return rule(
        torch.cat(logits),
        (starts[:, None] + torch.arange(max(sizes))).clamp(max=sum(sizes) - 1),
        batched(trees),
        make_sampling_batch(params, CPU),
        torch.tensor([len(output) for output in said]),
        make_rules(requests),
        max_depth=max_depth,
    )


def answers(walked: Walk) -> list[tuple[list[int], list[int]]]:
    return [
        (tokens[:length], nodes[:length])
        for tokens, nodes, length in zip(
            walked.tokens_BL.tolist(),
            walked.nodes_BL.tolist(),
            walked.lengths_B.tolist(),
            strict=True,
        )
    ]


def plain_decoding(case: Case, row: int) -> tuple[list[int], list[int]]:
    """One token at a time, each from a tree that is only a root, counted anew every time."""
    trees, params, said, logits = case
    tree, node, tokens, nodes = trees[row], 0, [], []
    while True:
        root = PlainTree([0], [0])
        one = ([root], [params[row]], [said[row] + tokens], [logits[row][node][None]])
        tokens.append(answers(walk(walk_gumbel, one))[0][0][0])
        nodes.append(node)
        following = [c for c in tree.children(node) if tree.tokens[c] == tokens[-1]]
        if not following:
            return tokens, nodes
        node = following[0]


@settings(max_examples=80)
@given(cases())
def test_drafts_do_not_change_what_rules_allow(case: Case) -> None:
    expected = [plain_decoding(case, row) for row in range(len(case[0]))]
    assert answers(walk(walk_gumbel, case)) == expected
    for tokens, one, output in zip((t for t, _ in expected), *case[1:3], strict=True):
        early = max(0, one.min_tokens - len(output))
        assert not EOS & set(tokens[:early])


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25)
@given(case=cases())
def test_a_known_depth_changes_nothing(rule: Rule, case: Case) -> None:
    deepest = max(len(tree.path(node)) - 1 for tree in case[0] for node in range(len(tree.tokens)))
    assert answers(walk(rule, case, max_depth=deepest)) == answers(walk(rule, case))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(case=cases())
def test_logprobs_are_those_of_the_nodes_that_chose(rule: Rule, case: Case) -> None:
    trees, params, _, logits = case
    walked = walk(rule, case)
    if all(one.logprobs is None for one in params):
        assert walked.logprobs is None
        return
    assert walked.logprobs is not None
    emitted = [tokens for tokens, _ in answers(walked)]
    records = read_logprobs(walked.logprobs, emitted, params)
    for row, (tokens, nodes) in enumerate(answers(walked)):
        num_top = params[row].logprobs
        if num_top is None:
            assert records[row] is None
            continue
        found = records[row]
        assert found is not None
        assert [one.token_id for one in found] == tokens
        for one, token, node in zip(found, tokens, nodes, strict=True):
            expected_V = logits[row][node].log_softmax(dim=-1)
            assert one.logprob == pytest.approx(float(expected_V[token]), abs=1e-5)
            best = expected_V.topk(num_top)
            assert [token_id for token_id, _ in one.top] == best.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_there_are_no_more_alternatives_than_tokens() -> None:
    params = [SamplingParams(logprobs=20)]
    walked = walk(walk_gumbel, ([PlainTree([0], [0])], params, [[]], [torch.zeros(1, VOCAB_SIZE)]))
    assert walked.logprobs is not None
    records = read_logprobs(walked.logprobs, [[0]], params)[0]
    assert records is not None
    assert len(records[0].top) == VOCAB_SIZE
    assert records[0].logprob == pytest.approx(-math.log(VOCAB_SIZE))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(
    case=cases(),
    bad=st.sampled_from([NAN, math.inf]),
    everywhere=st.booleans(),
    data=st.data(),
)
def test_logits_that_are_no_numbers_fail_their_request_only(
    rule: Rule, case: Case, bad: float, everywhere: bool, data: st.DataObject
) -> None:
    trees, params, said, logits = case
    before = walk(rule, case)
    assert not before.failed_B.any()
    row = data.draw(st.integers(0, len(trees) - 1))
    node = data.draw(st.integers(0, len(trees[row].tokens) - 1))
    token = data.draw(st.integers(0, VOCAB_SIZE - 1))
    spoiled = [rows.clone() for rows in logits]
    spoiled[row][node, slice(None) if everywhere else token] = bad
    after = walk(rule, (trees, params, said, spoiled))
    was_visited = node in answers(before)[row][1]
    assert after.failed_B.tolist() == [was_visited and i == row for i in range(len(trees))]
    for i, (one, same) in enumerate(zip(answers(before), answers(after), strict=True)):
        if i != row or not was_visited:
            assert one == same
    assert bool((after.tokens_BL >= 0).all())
    assert bool((after.tokens_BL < VOCAB_SIZE).all())


def test_rows_without_any_possible_token_fail() -> None:
    """Nothing but -inf, and a penalty so large that logits overflow."""
    root, zeros = PlainTree([0], [0]), torch.zeros(1, VOCAB_SIZE)
    params = [SamplingParams(), SamplingParams(repetition_penalty=1e-308), SamplingParams()]
    logits = [torch.full((1, VOCAB_SIZE), -math.inf), zeros + 20, zeros]
    walked = walk(walk_gumbel, ([root] * 3, params, [[], [], []], logits))
    assert walked.failed_B.tolist() == [True, True, False]
