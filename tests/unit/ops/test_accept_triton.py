"""Walks by two kernels, in Triton's interpreter, against the walk written out level by level.

Catches: noise of another depth, seed or column; a tie that goes to the later token; a child of
another node or of the padding; a flaw in logits that nobody visits; parts of the vocabulary.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.sampling import make_sampling_batch
from fledge.ops.tree import TreeBatch, depths
from tests.unit.ops.random_trees import VOCAB_SIZE, PlainTree, batched, plain_trees

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
CPU = torch.device("cpu")


def both_walks(
    logits_RV: Tensor, tree: TreeBatch, params: list[SamplingParams], start: int = 3
) -> tuple[Walk, Walk]:
    rows_BN = torch.arange(tree.tokens_BN.numel()).view(tree.tokens_BN.shape).flip(0)
    batch = make_sampling_batch(params, CPU)
    position_B = torch.arange(len(params)) + start
    max_depth = int(depths(tree.parents_BN).max())
    with choose_kernels("triton"):
        fused = walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, max_depth=max_depth)
    plain = walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, max_depth=max_depth)
    return fused, plain


def check(fused: Walk, plain: Walk) -> None:
    assert torch.equal(fused.lengths_B, plain.lengths_B)
    assert torch.equal(fused.failed_B, plain.failed_B)
    for row, length in enumerate(plain.lengths_B.tolist()):
        assert torch.equal(fused.nodes_BL[row, :length], plain.nodes_BL[row, :length])
        if not plain.failed_B[row]:
            assert torch.equal(fused.tokens_BL[row, :length], plain.tokens_BL[row, :length])


@given(st.lists(plain_trees(max_nodes=9), min_size=3, max_size=3), st.integers(0, 999))
@settings(max_examples=6)
def test_any_trees(trees: list[PlainTree], seed: int) -> None:
    """Few tokens, so that children are often chosen; whole numbers, so that ties are common."""
    tree = batched(trees, padding_token=2)
    generator = torch.Generator().manual_seed(seed)
    shape = (tree.tokens_BN.numel(), VOCAB_SIZE)
    logits_RV = torch.randint(-2, 3, shape, generator=generator).to(torch.float16)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=seed),
        SamplingParams(temperature=2.0, seed=2**62 + seed),
    ]
    check(*both_walks(logits_RV, tree, params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_vocabulary_in_parts_and_logprobs(dtype: torch.dtype) -> None:
    tree = batched([PlainTree([0, 9000, 5], [0, 0, 1]), PlainTree([0], [0])])
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(6, 20_000, generator=generator).to(dtype)
    # Rows are those of the other request: node 0 of the first is row 3.
    logits_RV[3, 9000] = logits_RV[3, 9001] = logits_RV[3, 19_999] = 9.0
    logits_RV[4, 5] = 9.0
    params = [SamplingParams(logprobs=2), SamplingParams(temperature=1.0, seed=4)]
    fused, plain = both_walks(logits_RV, tree, params)
    check(fused, plain)
    assert fused.lengths_B.tolist() == [3, 1]
    assert fused.tokens_BL[0, :2].tolist() == [9000, 5], "the first of equals"
    assert fused.logprobs is not None
    assert plain.logprobs is not None
    torch.testing.assert_close(fused.logprobs.chosen_BL, plain.logprobs.chosen_BL)


@pytest.mark.parametrize("flaw", [float("nan"), float("inf"), float("-inf")])
def test_flaws_count_where_a_walk_comes_by(flaw: float) -> None:
    tree = batched([PlainTree([0, 1, 2], [0, 0, 0]) for _ in range(3)])
    logits_RV = torch.zeros(9, VOCAB_SIZE)
    logits_RV[[0, 3, 6], 1] = 5.0
    for row in (1, 5, 6):  # an accepted child, a child that nobody goes to, a root
        logits_RV[row, 0 if flaw != float("-inf") else slice(None)] = flaw
    params = [SamplingParams(), SamplingParams(), SamplingParams(temperature=1e-3, seed=1)]
    fused, plain = both_walks(logits_RV, tree, params)
    check(fused, plain)
    assert plain.failed_B.tolist() == [True, False, True]
    assert int(fused.tokens_BL.max()) < VOCAB_SIZE
