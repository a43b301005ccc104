"""Walks and the best of logits by kernels on a GPU: as the plain ones say, without waiting."""

from collections.abc import Iterator

import pytest
import torch

from fledge.contracts.sampling import SamplingParams
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.noised_top import Draws, noised_top, num_candidates
from fledge.ops.sampling import make_sampling_batch
from fledge.ops.top_logprobs import top_logprobs
from fledge.ops.tree import TreeBatch, depths
from tests.paged_cases import random_trees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZE = 128_256
SIZES = [64, 0, 7, 1, 30, 12]
GREEDY = [SamplingParams()] * len(SIZES)
MIXED = [
    SamplingParams() if i % 2 else SamplingParams(temperature=0.5 + i, seed=2**40 + i)
    for i in range(len(SIZES))
]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with choose_kernels("triton"):
        yield
    torch.cuda.set_sync_debug_mode("default")


def walk(device: str, dtype: torch.dtype, params: list[SamplingParams]) -> Walk:
    """Trees whose nodes mostly want one of their children; one root is flawed."""
    place = torch.device(device)
    trees = random_trees(SIZES, seed=4, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    shape = trees.tokens_BN.shape
    tokens_BN = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    logits_RV = torch.randn(tokens_BN.numel(), VOCAB_SIZE, generator=generator).to(dtype)
    rows_BN = torch.arange(tokens_BN.numel()).view(shape)
    for request, size in enumerate(SIZES):
        for node in range(1, size + 1):
            parent = int(trees.parents_BN[request, node])
            logits_RV[rows_BN[request, parent], tokens_BN[request, node]] = 30.0 + node % 5
    logits_RV[rows_BN[3, 0], 77] = float("nan")
    max_depth = int(depths(trees.parents_BN).max())
    tree = TreeBatch(
        tokens_BN=tokens_BN.to(place),
        parents_BN=trees.parents_BN.to(place),
        sizes_B=trees.sizes_B.to(place),
        logprobs_BN=trees.logprobs_BN.to(place),
        num_drafts=trees.num_drafts,
    )
    batch = make_sampling_batch(params, place)
    position_B = torch.arange(len(params), device=place) * 100
    logits_RV, rows_BN = logits_RV.to(place), rows_BN.to(place)

    def run() -> Walk:
        return walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, max_depth=max_depth)

    if device == "cpu":
        with choose_kernels("plain"):
            return run()
    run()
    torch.cuda.set_sync_debug_mode("error")
    found = run()
    torch.cuda.set_sync_debug_mode("default")
    return found


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_walk_of_the_cpu(dtype: torch.dtype, params: list[SamplingParams]) -> None:
    ours, expected = walk("cuda", dtype, params), walk("cpu", dtype, params)
    assert torch.equal(ours.lengths_B.cpu(), expected.lengths_B)
    assert torch.equal(ours.failed_B.cpu(), expected.failed_B)
    assert expected.failed_B.tolist() == [False, False, False, True, False, False]
    assert int(expected.lengths_B.max()) > 2
    for row, length in enumerate(expected.lengths_B.tolist()):
        assert torch.equal(ours.nodes_BL[row, :length].cpu(), expected.nodes_BL[row, :length])
        if row != 3:
            assert torch.equal(ours.tokens_BL[row, :length].cpu(), expected.tokens_BL[row, :length])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "vocab_size", "num_best"), [(1, 32_000, 1), (512, 32_003, 8)])
def test_the_best_of_logits(rows: int, vocab_size: int, num_best: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits_TV = 4 * torch.randn(rows, vocab_size, generator=generator, device="cuda").to(dtype)
    top_logprobs(logits_TV, num_best)
    torch.cuda.set_sync_debug_mode("error")
    got = top_logprobs(logits_TV, num_best)
    torch.cuda.set_sync_debug_mode("default")
    with choose_kernels("plain"):
        wanted = top_logprobs(logits_TV, num_best)
    torch.testing.assert_close(got.logprobs_TK, wanted.logprobs_TK, rtol=1e-4, atol=1e-4)
    # Equal logits may come in any order, so what was chosen is compared by its logit.
    chosen, expected = (logits_TV.gather(1, one.indices_TK) for one in (got, wanted))
    assert torch.equal(chosen, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("width", [1, 8])
def test_the_best_under_noise(width: int) -> None:
    """Greedy rows, filters and none, seeds of 63 bits; as on the CPU, without waiting."""
    num_requests, vocab_size = 64, 32_003
    generator = torch.Generator().manual_seed(width)
    logits_TV = 4 * torch.randn(num_requests * width, vocab_size, generator=generator)
    logits_TV[5] = float("nan")
    top = top_logprobs(logits_TV.cuda(), num_candidates(width, vocab_size))
    places_B = torch.arange(num_requests)
    draws = Draws(
        sampled_B=places_B % 4 > 0,
        seed_B=2**63 - 1 - places_B,
        position_B=places_B * 1000,
        top_k_B=(places_B % 5 == 0) * (places_B % 3),
        temperature_B=0.3 + 0.1 * places_B.double(),
        top_p_B=torch.where(places_B % 3 == 0, 0.8, 1.0).double(),
        min_p_B=torch.where(places_B % 7 == 0, 0.05, 0.0).double(),
    )
    to_target_V = torch.randperm(vocab_size, generator=generator)
    ours = Draws(*(one_B.cuda() for one_B in draws))
    on_gpu = to_target_V.cuda()
    noised_top(top, on_gpu, ours, depth=3, width=width)
    torch.cuda.set_sync_debug_mode("error")
    got = noised_top(top, on_gpu, ours, depth=3, width=width)
    torch.cuda.set_sync_debug_mode("default")
    with choose_kernels("plain"):
        same = type(top)(*(one_TK.cpu() for one_TK in top))
        wanted = noised_top(same, to_target_V, draws, depth=3, width=width)
    assert torch.equal(got.indices_TK.cpu(), wanted.indices_TK)
    torch.testing.assert_close(
        got.logprobs_TK.cpu(), wanted.logprobs_TK, rtol=1e-4, atol=1e-4, equal_nan=True
    )
