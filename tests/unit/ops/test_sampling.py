"""Filters keep and drop exactly the tokens transformers' own warpers keep and drop, row by row.

Where several tokens tie at the border of top-p, transformers leaves it to an unstable sort which of
them stay; there the number of tokens that stay is compared.

Catches: another order of the filters, ties cut differently, a filter of one request applied to its
neighbour, a greedy request whose token depends on the sampled ones beside it, and rounding in a
narrower type than transformers is given.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fledge.contracts.sampling import SamplingParams
from fledge.ops import portions
from fledge.ops.noise import gumbel
from fledge.ops.sampling import make_sampling_batch, processed_portions, sample

CPU = torch.device("cpu")

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**40),
)


@st.composite
def rows_and_params(draw: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    params = draw(st.lists(params_strategy, min_size=1, max_size=5))
    vocab_size = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = 3 * torch.randn(len(params), vocab_size, generator=generator)
    if draw(st.booleans()):  # whole numbers: many ties
        rows = rows.round()
    return rows, params


def process(rows_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Log-weights of all rows; none of them may be greedy."""
    got_BV = torch.full_like(rows_BV, float("nan"), dtype=torch.float64)
    for rows, scores_SV in processed_portions(rows_BV, make_sampling_batch(params, CPU)):
        got_BV[rows.rows_S] = scores_SV
    return got_BV


def oracle(row_V: Tensor, params: SamplingParams) -> Tensor:
    """transformers' warpers in generate's order, in float64, for one row with its best at 0."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    shifted_V = row_V.double() - row_V.double().max()
    return warpers(torch.zeros(1, 1, dtype=torch.long), shifted_V[None])[0]


@settings(max_examples=150)
@given(rows_and_params())
@example((torch.zeros(2, 6), [SamplingParams(temperature=1.0, top_k=2, top_p=0.5)] * 2))
@example((torch.zeros(1, 4), [SamplingParams(temperature=1.0, top_p=0.5)]))
def test_processed_rows_equal_transformers(case: tuple[Tensor, list[SamplingParams]]) -> None:
    rows_BV, params = case
    got_BV = process(rows_BV, params)
    assert got_BV.dtype == torch.float64
    for got_V, row_V, one in zip(got_BV, rows_BV, params, strict=True):
        expected_V = oracle(row_V, one)
        if row_V.unique().numel() == row_V.numel() or one.top_p == 1:
            assert torch.equal(got_V, expected_V)
        assert torch.equal(got_V.sort().values, expected_V.sort().values)


@given(rows_and_params())
def test_something_always_stays_and_the_best_token_is_part_of_it(
    case: tuple[Tensor, list[SamplingParams]],
) -> None:
    rows_BV, params = case
    got_BV = process(rows_BV, params)
    kept_B1 = got_BV.argmax(dim=-1, keepdim=True)
    assert torch.equal(rows_BV.gather(1, kept_B1), rows_BV.amax(dim=-1, keepdim=True))
    assert bool((got_BV.amax(dim=-1) == 0).all())


@given(rows_and_params(), st.integers(0, 50))
def test_a_row_is_sampled_as_if_it_were_alone(
    case: tuple[Tensor, list[SamplingParams]], position: int
) -> None:
    """Greedy rows mixed in: they get the argmax of their own logits, and disturb nobody."""
    rows_BV, params = case
    greedy = SamplingParams(top_k=1, min_p=0.5, seed=3)
    mixed = [one for pair in zip(params, [greedy] * len(params), strict=True) for one in pair]
    rows_BV = rows_BV.repeat_interleave(2, dim=0)
    position_B = position + torch.arange(len(mixed))
    got_B = sample(rows_BV, make_sampling_batch(mixed, CPU), position_B)
    for i, one in enumerate(mixed):
        if one.is_greedy:
            assert got_B[i] == rows_BV[i].argmax()
        else:
            where = position_B[i : i + 1]
            alone_1V = process(rows_BV[i : i + 1], [one])
            noise_1V = gumbel(torch.tensor([one.seed]), where, rows_BV.shape[1])
            assert got_B[i] == (alone_1V + noise_1V).argmax()


@given(case=rows_and_params(), wanted=st.lists(st.booleans(), min_size=5, max_size=5))
def test_portions_and_unwanted_rows_change_nothing(
    case: tuple[Tensor, list[SamplingParams]], wanted: list[bool]
) -> None:
    rows_BV, params = case
    batch, position_B = make_sampling_batch(params, CPU), torch.arange(len(params))
    expected_B = sample(rows_BV, batch, position_B)
    wanted_B = torch.tensor(wanted[: len(params)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(portions, "_CPU_ELEMENTS", 2 * rows_BV.shape[1])
        assert torch.equal(sample(rows_BV, batch, position_B), expected_B)
        some_B = sample(rows_BV, batch, position_B, wanted_B)
        assert torch.equal(some_B[wanted_B], expected_B[wanted_B])


def test_an_all_greedy_batch_takes_the_first_of_equal_logits() -> None:
    rows_BV = torch.tensor([[1.0, 4.0, 4.0], [2.0, 2.0, 2.0]])
    batch = make_sampling_batch([SamplingParams()] * 2, CPU)
    assert batch.all_greedy
    assert sample(rows_BV, batch, torch.tensor([0, 5])).tolist() == [1, 0]
    mixed = make_sampling_batch([SamplingParams()] * 2 + [SamplingParams(temperature=9.0)], CPU)
    rows_BV = torch.cat([rows_BV, rows_BV[:1]])
    assert sample(rows_BV, mixed, torch.tensor([0, 5, 1])).tolist()[:2] == [1, 0]


def test_half_precision_logits_are_processed_in_double() -> None:
    """In float16 a temperature of 0.001 would overflow and the softmax would be no number."""
    rows_BV = torch.tensor([[30.0, 29.5, -30.0]], dtype=torch.float16)
    got = process(rows_BV, [SamplingParams(temperature=1e-3)])
    assert got.dtype == torch.float64
    assert bool(got.isfinite().all())


def test_a_vanishing_temperature_is_greedy() -> None:
    """Dividing first would make infinite logits, and their differences no numbers."""
    rows_BV = torch.tensor([[30.0, 29.5, -30.0]])
    params = SamplingParams(temperature=5e-324, top_p=0.9, seed=4)
    assert sample(rows_BV, make_sampling_batch([params], CPU), torch.tensor([0])).tolist() == [0]
