"""Children under the target's noise: the rule against itself written as a loop, and its kernel.

Catches: noise of another position, depth, seed or id than the target's; filters that keep or drop
one too many; greedy rows that are changed; an order that is not falling; rows whose logits are no
numbers; candidates or children that are more than there are.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.ops import kernel_choice, noised_top
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.noise import gumbel
from fledge.ops.noised_top import Draws, num_candidates
from fledge.ops.top_logprobs import TopLogprobs

VOCAB_SIZE = 120
ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")


def draws(*requests: dict[str, Any]) -> Draws:
    """Requests as a batch has them; what one does not say is as by default."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([one.get(name, default) for one in requests], dtype=dtype)

    return Draws(
        sampled_B=torch.tensor([one.get("temperature", 1.0) > 0 for one in requests]),
        seed_B=column("seed", 0, torch.long),
        position_B=column("position", 0, torch.long),
        top_k_B=column("top_k", 0, torch.long),
        temperature_B=torch.tensor(
            [one.get("temperature", 1.0) or 1.0 for one in requests], dtype=torch.float64
        ),
        top_p_B=column("top_p", 1.0, torch.float64),
        min_p_B=column("min_p", 0.0, torch.float64),
    )


def some_top(num_rows: int, count: int, seed: int = 0) -> tuple[TopLogprobs, Tensor]:
    """The best of some random logits, and the target's ids of the head's columns."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 3.0 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)
    to_target_V = torch.randperm(500, generator=generator)[:VOCAB_SIZE].sort().values
    return TopLogprobs(*logits_TV.log_softmax(dim=1).topk(count)), to_target_V


def by_loop(
    logprobs: list[float], noise: list[float], one: dict[str, Any], width: int
) -> list[tuple[int, float]]:
    """Places of a row's children, and their log-probabilities."""
    temperature, top_k = one.get("temperature", 1.0), one.get("top_k", 0)
    if not temperature or top_k == 1:
        return list(enumerate(logprobs))[:width]
    weights = [(value - logprobs[0]) / temperature for value in logprobs]
    kept = [place for place in range(len(weights)) if not top_k or place < top_k]
    total = sum(math.exp(weights[place]) for place in kept)
    noised, before = list[float](), 0.0
    for place, weight in enumerate(weights):
        has_mass = one.get("top_p", 1.0) == 1.0 or before < one["top_p"] * total
        is_likely = math.exp(weight) >= one.get("min_p", 0.0)
        stays = place == 0 or (place in kept and has_mass and is_likely)
        noised.append(weight + noise[place] - (0.0 if stays else noised_top.DROPPED))
        before += math.exp(weight)
    scaled = [value / noised_top.SCALE for value in noised]
    log_total = math.log(sum(math.exp(value) for value in scaled))
    best = sorted(range(len(noised)), key=lambda place: -noised[place])[:width]
    return [(place, scaled[place] - log_total) for place in best]


REQUESTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 2**31),
    },
    optional={
        "top_k": st.integers(0, 40),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    },
)


@settings(max_examples=60)
@given(st.lists(REQUESTS, min_size=1, max_size=3), st.integers(1, 20), st.integers(1, 7))
def test_the_rule(requests: list[dict[str, Any]], width: int, depth: int) -> None:
    rows_each, count = 2, num_candidates(width, VOCAB_SIZE)
    top, to_target_V = some_top(rows_each * len(requests), count, seed=width)
    got = noised_top.noised_top(top, to_target_V, draws(*requests), depth=depth, width=width)
    assert got.logprobs_TK.dtype == torch.float32
    for row in range(rows_each * len(requests)):
        one = requests[row // rows_each]
        where = torch.tensor([one["position"] + depth - 1])
        noise_V = gumbel(torch.tensor([one["seed"]]), where, 500)[0]
        noise = noise_V[to_target_V[top.indices_TK[row]]].tolist()
        wanted = by_loop(top.logprobs_TK[row].tolist(), noise, one, width)
        columns = top.indices_TK[row, [place for place, _ in wanted]]
        assert got.indices_TK[row].tolist() == columns.tolist()
        expected = torch.tensor([value for _, value in wanted])
        torch.testing.assert_close(got.logprobs_TK[row], expected, rtol=1e-5, atol=1e-5)


def test_the_most_probable_of_many_draws_are_drafted_as_often_as_they_are_probable() -> None:
    """The first child is a sample of the head's distribution, since its noise is the target's."""
    count = 20_000
    logprobs_K = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    top = TopLogprobs(logprobs_K.repeat(count, 1), torch.arange(4).repeat(count, 1))
    asked = draws(*({"seed": seed, "position": 3} for seed in range(count)))
    got = noised_top.noised_top(top, torch.arange(4), asked, depth=2, width=1)
    shares = torch.bincount(got.indices_TK[:, 0], minlength=4) / count
    torch.testing.assert_close(shares, logprobs_K.exp(), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("width", "vocab_size", "count"), [(1, 97, 16), (8, 97, 32), (80, 97, 80), (8, 10, 10)]
)
def test_candidates_are_enough_and_no_more_than_there_are(
    width: int, vocab_size: int, count: int
) -> None:
    assert num_candidates(width, vocab_size) == count


CASES = {
    "mixed": [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"seed": 2**63 - 1}],
    "filters": [{"top_k": 1}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.2}, {"min_p": 1.0}],
    "cold": [{"temperature": 5e-324}, {"temperature": 1e-9}, {"temperature": 1e300}],
}


def check_kernel(top: TopLogprobs, to_target_V: Tensor, asked: Draws, width: int) -> TopLogprobs:
    """What the kernel finds, which is what plain operations find."""
    wanted = noised_top.noised_top(top, to_target_V, asked, depth=3, width=width)
    with choose_kernels("triton"):
        got = noised_top.noised_top(top, to_target_V, asked, depth=3, width=width)
    assert torch.equal(got.indices_TK, wanted.indices_TK)
    torch.testing.assert_close(
        got.logprobs_TK, wanted.logprobs_TK, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    return got


@ON_A_GPU
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("width", "count"), [(1, 16), (8, 32), (5, 5), (1, 1), (3, 20)])
def test_the_kernel(case: str, width: int, count: int) -> None:
    pytest.importorskip("triton")
    requests = CASES[case]
    top, to_target_V = some_top(2 * len(requests), count)
    got = check_kernel(top, to_target_V, draws(*requests), width)
    assert not got.logprobs_TK.isnan().any()
    for row, one in enumerate(requests):
        if not one.get("temperature", 1.0) or one.get("top_k") == 1:
            for mine in (2 * row, 2 * row + 1):
                assert torch.equal(got.logprobs_TK[mine], top.logprobs_TK[mine, :width])
                assert torch.equal(got.indices_TK[mine], top.indices_TK[mine, :width])


@ON_A_GPU
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_logits_that_are_no_numbers_and_those_that_rule_out() -> None:
    pytest.importorskip("triton")
    top, to_target_V = some_top(3, 16)
    logprobs_TK = top.logprobs_TK.clone()
    logprobs_TK[0] = float("nan")
    logprobs_TK[1, 2:] = float("-inf")
    top = TopLogprobs(logprobs_TK, top.indices_TK)
    got = check_kernel(top, to_target_V, draws({"seed": 5}), width=4)
    assert got.logprobs_TK[0].isnan().all()
    assert got.indices_TK[0].tolist() == top.indices_TK[0, :4].tolist()
    assert got.logprobs_TK[1, :2].isfinite().all()
    assert got.logprobs_TK[1, 2:].eq(float("-inf")).all()
    assert sorted(got.indices_TK[1, :2].tolist()) == sorted(top.indices_TK[1, :2].tolist())


@ON_A_GPU
def test_a_wrong_kernel_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = pytest.importorskip("fledge.ops.noised_top_triton")
    monkeypatch.setattr(kernel_choice, "_broken", set())
    monkeypatch.setattr(kernel_choice, "_checked", set())
    top, to_target_V = some_top(2, 16)
    asked = draws({"seed": 1}, {"seed": 2})
    wanted = noised_top.noised_top(top, to_target_V, asked, depth=1, width=3)
    monkeypatch.setattr(noised_top, "uses_kernels", lambda tensor: True)
    real = kernel.noised_rows

    def off_by_a_row(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(one.roll(1, dims=0) for one in real(*args, **options))

    assert torch.equal(
        noised_top.noised_top(top, to_target_V, asked, depth=1, width=3).indices_TK,
        wanted.indices_TK,
    )
    assert not kernel_choice._broken
    kernel_choice._checked.clear()
    monkeypatch.setattr(kernel, "noised_rows", off_by_a_row)
    got = noised_top.noised_top(top, to_target_V, asked, depth=1, width=3)
    assert torch.equal(got.indices_TK, wanted.indices_TK)
    assert "drafts under noise is wrong on this device" in caplog.text
