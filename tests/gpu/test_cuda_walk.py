"""Walks on a GPU: the same tokens and logprobs as on the CPU, and nobody waits for the device."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.logit_rules import RequestRules, TokenCounts, make_rules
from fledge.ops.sampling import make_sampling_batch
from fledge.ops.tree import TreeBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZE, DEPTH, NUM_CYCLES = 5000, 4, 3
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
    SamplingParams(temperature=1.2, top_k=50, min_p=0.01, presence_penalty=1.0, seed=4),
    SamplingParams(logit_bias={7: 3.0, 9: -2.0}, min_tokens=3, logprobs=5),
    SamplingParams(temperature=1.0, seed=5),
]


def chains(device: str) -> tuple[Tensor, Tensor, TreeBatch]:
    """Logits that mostly want the drafted child, their rows, and one chain for each request."""
    generator = torch.Generator().manual_seed(0)
    count, num_nodes = len(PARAMS), DEPTH + 1
    tokens_BN = torch.randint(0, VOCAB_SIZE, (count, num_nodes), generator=generator)
    logits_RV = 3 * torch.randn(count * num_nodes, VOCAB_SIZE, generator=generator)
    rows_BN = torch.arange(count * num_nodes).view(count, num_nodes)
    wanted_BN = torch.rand(count, DEPTH, generator=generator) < 0.7
    logits_RV[rows_BN[:, :-1][wanted_BN], tokens_BN[:, 1:][wanted_BN]] += 40.0
    logits_RV[rows_BN[5, 1]] = float("nan")
    parents_BN = (torch.arange(num_nodes) - 1).clamp(min=0).repeat(count, 1)
    tree = TreeBatch(
        tokens_BN=tokens_BN.to(device),
        parents_BN=parents_BN.to(device),
        sizes_B=torch.full((count,), num_nodes, device=device),
        logprobs_BN=torch.zeros(count, num_nodes, device=device),
        num_drafts=count * DEPTH,
    )
    return logits_RV.to(device), rows_BN.to(device), tree


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def walks(device: str) -> list[Walk]:
    """Several cycles over the same trees: the counts go on from one to the next."""
    place = torch.device(device)
    logits_RV, rows_BN, tree = chains(device)
    counts = TokenCounts(VOCAB_SIZE, place)
    rules = make_rules([RequestRules(one, [1, 2, 3], [], frozenset({2}), counts) for one in PARAMS])
    batch = make_sampling_batch(PARAMS, place)
    position_B = torch.zeros(len(PARAMS), dtype=torch.long, device=place)
    found = []
    for _ in range(NUM_CYCLES):
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        walk = walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, rules, max_depth=DEPTH)
        torch.cuda.set_sync_debug_mode("default")
        found.append(walk)
        position_B = position_B + walk.lengths_B
    return found


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_walk_does_not_wait_and_says_what_the_cpu_says() -> None:
    for ours, expected in zip(walks("cuda"), walks("cpu"), strict=True):
        assert torch.equal(ours.lengths_B.cpu(), expected.lengths_B)
        assert torch.equal(ours.failed_B.cpu(), expected.failed_B)
        for row, length in enumerate(expected.lengths_B.tolist()):
            if not expected.failed_B[row]:
                assert torch.equal(
                    ours.tokens_BL[row, :length].cpu(), expected.tokens_BL[row, :length]
                )
        assert ours.logprobs is not None
        assert expected.logprobs is not None
        for row, length in enumerate(expected.lengths_B.tolist()):
            torch.testing.assert_close(
                ours.logprobs.chosen_BL[row, :length].cpu(),
                expected.logprobs.chosen_BL[row, :length],
            )
    assert bool(expected.lengths_B.gt(1).any())
