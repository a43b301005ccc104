"""Kernels of a decoder layer, in Triton's interpreter, against their plain twins.

Catches: widths that are no power of two, rows with gaps between them, a family's order of casting
and scaling, halves of a head exchanged or turned the wrong way, keys and values in each other's
place, a slot that is none written to.
"""

import itertools

import pytest
import torch
from torch import Tensor

from fledge.ops.experts import multiply_by_expert
from fledge.ops.gated import Activation, gated
from fledge.ops.head_input import join_inputs
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.norms import Norm, NormKind, residual_norm
from fledge.ops.rope_write import HeadLayout, Rotation, rotate_and_store, split_heads

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
DTYPES = [torch.float32, torch.float16]
CLOSE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}
KINDS: tuple[NormKind, ...] = ("cast_first", "cast_last", "one_plus")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_norm(dtype: torch.dtype) -> None:
    size = 40
    # Rows of a wider product: what a norm over the width of queries reads.
    fresh = random(2, size + 5, dtype=dtype, seed=1)[:, :size]
    stream = random(2, size, dtype=dtype, seed=2)
    for given, after, before in itertools.product((None, stream), (None, *KINDS), (None, *KINDS)):
        norms = [
            None if kind is None else Norm(random(size, dtype=dtype, seed=3 + i), 1e-5, kind)
            for i, kind in enumerate((after, before))
        ]
        wanted = residual_norm(fresh, given, after=norms[0], before=norms[1])
        with choose_kernels("triton"):
            got = residual_norm(fresh, given, after=norms[0], before=norms[1])
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keeps_normed", [False, True], ids=["as it was", "normed"])
def test_inputs_of_a_head(keeps_normed: bool, dtype: torch.dtype) -> None:
    size, tokens, rows = 40, torch.tensor([3, 0, 3, 8]), torch.tensor([5, 1, 1, 0])
    embedding = random(9, size, dtype=dtype, seed=1)
    # Rows of a wider tensor, as features that were fused side by side are.
    hidden = random(6, size + 7, dtype=dtype, seed=2)[:, :size]
    for eps in (1e-5, 1e-2):  # the kernel takes one for both; others are left to its twin
        norms = (
            Norm(random(size, dtype=dtype, seed=3), 1e-5, "cast_first"),
            Norm(random(size, dtype=dtype, seed=4), eps, "cast_first"),
        )
        wanted = join_inputs(tokens, embedding, hidden, rows, norms, keeps_normed=keeps_normed)
        with choose_kernels("triton"):
            got = join_inputs(tokens, embedding, hidden, rows, norms, keeps_normed=keeps_normed)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(activation: Activation, dtype: torch.dtype) -> None:
    both = random(3, 2 * 1100, dtype=dtype) * 4
    both[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -0.0])
    with choose_kernels("triton"):
        got = gated(both, activation)
    torch.testing.assert_close(got, gated(both, activation), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 96])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_rotations(size: int, kind: NormKind | None, dtype: torch.dtype) -> None:
    heads, groups, rows = 3, 2, 4
    norm = None
    if kind is not None:
        norm = Norm(random(heads + groups, size, dtype=dtype, seed=5), 1e-5, kind)
    layout = HeadLayout(heads, groups, size, norm)
    product = random(rows, (heads + 2 * groups) * size, dtype=dtype)
    angles = random(rows, size // 2, dtype=torch.float32, seed=7)
    # Tables are in the model's precision, or in float32 where the family keeps them so.
    rotation = Rotation(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))
    slots = torch.tensor([6, 0, 3, 5])
    pools = [[torch.zeros(8, groups, size, dtype=dtype) for _ in range(2)] for _ in range(2)]
    wanted = rotate_and_store(product, rotation, layout, pools[0][0], pools[0][1], slots)
    with choose_kernels("triton"):
        got = rotate_and_store(product, rotation, layout, pools[1][0], pools[1][1], slots)
        whole = split_heads(product, rotation, layout)
    torch.testing.assert_close(got, wanted, **CLOSE[dtype])
    for ours, theirs in zip(pools[1], pools[0], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE[dtype])
    for ours, theirs in zip(whole, split_heads(product, rotation, layout), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [(0, 3, 0, 18, 1), (0, 0, 0, 0, 1), (2, 0, 0, 0, 0)], ids=str)
def test_products_of_experts(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = random(sum(counts), 72, dtype=dtype) / 8
    weights = random(len(counts), 40, 72, dtype=dtype, seed=1)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    wanted = multiply_by_expert(rows, weights, ends)
    with choose_kernels("triton"):
        got = multiply_by_expert(rows, weights, ends)
    torch.testing.assert_close(got, wanted, rtol=4e-3, atol=1e-5 if dtype == DTYPES[0] else 4e-3)


def test_rows_without_a_slot_are_stored_nowhere() -> None:
    layout = HeadLayout(1, 1, 4)
    product, rotation = random(2, 12, dtype=torch.float32), Rotation(torch.ones(2, 4))
    keys, values = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    with choose_kernels("triton"):
        rotate_and_store(product, rotation, layout, keys, values, torch.tensor([-1, 1]))
    assert keys[[0, 2]].eq(0).all()
    assert values[[0, 2]].eq(0).all()
    assert torch.equal(values[1, 0], product[1, 8:])
