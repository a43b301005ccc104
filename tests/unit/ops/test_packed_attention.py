"""Attention of a packed pass: fused = written out = a loop over queries, keys and heads.

Catches: a key of the wrong head when query heads share one, a window that counts slots (siblings
would push each other out) or is off by one, a tree mask that is transposed, a soft-cap before the
scale, a sink that is not part of the sum; and a pass whose parts write to each other's slots.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fledge.models.attention import attend_packed
from fledge.ops.attention import AttentionSpec, attend_fast, attend_plain
from fledge.ops.kv import KVPool
from fledge.ops.packed import PackedPass, Segment, SequencePart, pack
from tests.unit.ops.random_trees import PlainTree, plain_trees

HEAD_DIM = 8


def dense(
    query_QHD: Tensor, keys_KGD: Tensor, values_KGD: Tensor, sees: list[list[int]], spec: object
) -> Tensor:
    """One dot product at a time; `sees` lists the keys each query may look at."""
    assert isinstance(spec, AttentionSpec)
    out = torch.zeros(query_QHD.shape[0], query_QHD.shape[1], values_KGD.shape[2])
    group = query_QHD.shape[1] // keys_KGD.shape[1]
    for q, keys in enumerate(sees):
        for head in range(query_QHD.shape[1]):
            scores = []
            for key in keys:
                dot = float(query_QHD[q, head] @ keys_KGD[key, head // group]) * spec.scale
                if spec.soft_cap is not None:
                    dot = spec.soft_cap * math.tanh(dot / spec.soft_cap)
                scores.append(dot)
            sink = [] if spec.sinks_H is None else [float(spec.sinks_H[head])]
            total = sum(math.exp(score) for score in scores + sink)
            for key, score in zip(keys, scores, strict=True):
                out[q, head] += math.exp(score) / total * values_KGD[key, head // group]
    return out


def causal_segment(num_context: int, num_new: int) -> tuple[Segment, list[int], list[list[int]]]:
    """A segment, the positions of its keys, and which keys each query sees without a window."""
    num_keys = num_context + num_new
    positions = torch.arange(num_keys)
    segment = Segment(
        start=0,
        key_slots_K=positions,
        key_positions_K=positions,
        query_positions_Q=positions[num_context:],
        visible_QK=None,
    )
    sees = [list(range(num_context + i + 1)) for i in range(num_new)]
    return segment, positions.tolist(), sees


def tree_segment(num_context: int, tree: PlainTree) -> tuple[Segment, list[int], list[list[int]]]:
    size = len(tree.tokens)
    paths = [tree.path(node) for node in range(size)]
    positions = [*range(num_context), *(num_context + len(path) - 1 for path in paths)]
    sees = [[*range(num_context), *(num_context + node for node in path)] for path in paths]
    visible_QK = torch.zeros(size, num_context + size, dtype=torch.bool)
    for node, keys in enumerate(sees):
        visible_QK[node, keys] = True
    segment = Segment(
        start=0,
        key_slots_K=torch.arange(num_context + size),
        key_positions_K=torch.tensor(positions),
        query_positions_Q=torch.tensor(positions[num_context:]),
        visible_QK=visible_QK,
    )
    return segment, positions, sees


def check(
    case: tuple[Segment, list[int], list[list[int]]],
    *,
    num_heads: int = 4,
    group: int = 1,
    seed: int = 0,
    **options: object,
) -> None:
    """Both implementations against the loop, the window applied by counting positions."""
    segment, positions, sees = case
    num_keys, num_new = len(positions), segment.len
    window = options.get("window")
    if isinstance(window, int):
        start = num_keys - num_new
        sees = [
            [key for key in keys if positions[start + q] - positions[key] < window]
            for q, keys in enumerate(sees)
        ]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_new, num_heads, HEAD_DIM, generator=generator)
    keys = torch.randn(num_keys, num_heads // group, HEAD_DIM, generator=generator)
    # Values of another size than keys, as in multi-head latent attention.
    values = torch.randn(num_keys, num_heads // group, HEAD_DIM - 2, generator=generator)
    spec = AttentionSpec(scale=0.4, **options)
    expected = dense(query, keys, values, sees, spec)
    for attend in (attend_plain, attend_fast):
        got = attend(query, keys, values, segment, spec)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 10, 100])
@pytest.mark.parametrize(("num_context", "num_new"), [(0, 1), (0, 10), (9, 1), (4, 6)])
def test_causal(num_context: int, num_new: int, window: int | None) -> None:
    check(causal_segment(num_context, num_new), window=window)


@given(st.integers(0, 12), plain_trees(max_nodes=9), st.sampled_from([None, 1, 2, 3, 6, 12]))
def test_trees(num_context: int, tree: PlainTree, window: int | None) -> None:
    check(tree_segment(num_context, tree), num_heads=2, window=window)


def test_siblings_do_not_push_each_other_out_of_a_window() -> None:
    """Ten siblings below the root: a window of 3 still holds the root and the token before it."""
    tree = PlainTree(tokens=list(range(11)), parents=[0] * 11)
    segment, _, _ = tree_segment(5, tree)
    mask_QK = segment.mask(3)
    assert mask_QK is not None
    for sibling in range(1, 11):
        assert mask_QK[sibling].nonzero()[:, 0].tolist() == [4, 5, 5 + sibling]


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_query_heads_that_share_a_key_head(group: int, window: int | None) -> None:
    check(causal_segment(3, 5), num_heads=12, group=group, window=window)
    tree = PlainTree(tokens=[0, 1, 2, 3, 4], parents=[0, 0, 0, 1, 3])
    check(tree_segment(4, tree), num_heads=12, group=group, window=window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 0.7, 30.0])
def test_soft_cap_and_sinks(window: int | None, has_sinks: bool, soft_cap: float | None) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0]) if has_sinks else None
    check(causal_segment(4, 5), group=2, window=window, soft_cap=soft_cap, sinks_H=sinks)


def test_a_mask_is_made_once_for_all_layers_of_a_kind() -> None:
    segment, _, _ = causal_segment(2, 3)
    assert segment.mask(2) is segment.mask(2)
    assert segment.mask(2) is not segment.mask(None)
    one_token, _, _ = causal_segment(4, 1)
    assert one_token.mask(None) is None, "a lone token that sees everything needs no mask"
    assert one_token.mask(5) is None
    assert one_token.mask(4) is not None


def part(tokens: list[int], slots: list[int], first_position: int = 0) -> SequencePart:
    """Tokens whose keys are the last of these slots; the rest is context before them."""
    positions = first_position + torch.arange(len(slots))
    return SequencePart(
        token_ids_Q=torch.tensor(tokens),
        positions_Q=positions[-len(tokens) :],
        key_slots_K=torch.tensor(slots),
        key_positions_K=positions,
    )


def packed_example() -> PackedPass:
    return pack([part([11, 12], [4, 0, 7, 2]), part([13], [9, 1]), part([14, 15, 16], [3, 5, 8])])


def test_pack_lays_parts_end_to_end() -> None:
    packed = packed_example()
    assert packed.num_tokens == 6
    assert packed.token_ids_T.tolist() == [11, 12, 13, 14, 15, 16]
    assert packed.positions_T.tolist() == [2, 3, 1, 0, 1, 2]
    assert packed.write_slots_T.tolist() == [7, 2, 1, 3, 5, 8]
    assert [segment.rows for segment in packed.segments] == [slice(0, 2), slice(2, 3), slice(3, 6)]
    assert [segment.start for segment in packed.segments] == [0, 2, 3]


def test_a_pass_gives_each_sequence_what_it_gets_alone() -> None:
    """Three sequences on scattered slots, two of them with context already in the pool."""
    packed = packed_example()
    torch.manual_seed(0)
    pool = KVPool(10)
    context_slots = torch.tensor([4, 0, 9])
    pool.write(5, context_slots, torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM))
    query = torch.randn(6, 4, HEAD_DIM)
    keys, values = torch.randn(6, 2, HEAD_DIM), torch.randn(6, 2, HEAD_DIM)
    spec = AttentionSpec(scale=0.3, window=3)
    got = attend_packed(packed, pool, 5, query, keys, values, spec)
    for segment, slots in zip(packed.segments, ([4, 0, 7, 2], [9, 1], [3, 5, 8]), strict=True):
        all_keys, all_values = pool.read(5, torch.tensor(slots))
        assert torch.equal(all_keys[-segment.len :], keys[segment.rows])
        assert torch.equal(all_values[-segment.len :], values[segment.rows])
        start = len(slots) - segment.len
        sees = [list(range(max(0, start + i - 2), start + i + 1)) for i in range(segment.len)]
        expected = dense(query[segment.rows], all_keys, all_values, sees, spec)
        torch.testing.assert_close(got[segment.rows], expected, rtol=1e-5, atol=1e-5)
