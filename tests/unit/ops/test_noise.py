"""The noise is the published hash, bit for bit, and behaves like independent uniform numbers.

Catches: a shift that copies the sign bit, a constant with a wrong digit, a multiplication that does
not wrap, a 0 or 1 among the uniform numbers (whose Gumbel noise would be infinite), noise shared
between seeds, positions, tokens or streams, and noise that depends on the company in the batch.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fledge.ops.noise import gumbel, gumbel_of, uniform, uniform_bits

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
ALPHA = 1e-4
RECORDED = [
    [0x238275BC38FCBE91, 0xF89A2566B5822C54],
    [0x020A28ED9E2B2BC4, 0x17E03160B6345C52],
]

seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31)


def finalise(bits: int) -> int:
    """SplitMix64's finaliser on plain unsigned integers."""
    bits &= MASK64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK64
    return bits ^ (bits >> 31)


def known_bits(seed: int, position: int, column: int, stream: int) -> int:
    """What `uniform_bits` must return, unsigned."""
    base = finalise(seed + GOLDEN * (2 * stream + 1))
    base = finalise(base + GOLDEN * (position + 1))
    return finalise(base + GOLDEN * (column + 1))


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def test_the_finaliser_above_is_the_published_one() -> None:
    """First outputs of SplitMix64 seeded with 1234567, from the reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [finalise(1234567 + GOLDEN * (i + 1)) for i in range(3)] == published


def test_values_recorded_once_never_change() -> None:
    """Texts of old seeds depend on these; a change of the hash must be a decision."""
    bits = uniform_bits(long(0, 42), long(0, 7), 2)
    assert [[value & MASK64 for value in row] for row in bits.tolist()] == RECORDED


@given(seeds, positions, st.integers(1, 9), st.integers(0, 3))
def test_bits_equal_integer_arithmetic(
    seed: int, position: int, num_columns: int, stream: int
) -> None:
    bits = uniform_bits(long(seed), long(position), num_columns, stream)
    assert bits.dtype == torch.long
    expected = [known_bits(seed, position, column, stream) for column in range(num_columns)]
    assert [value & MASK64 for value in bits[0].tolist()] == expected


@given(seeds, positions)
def test_uniform_is_the_top_bits_in_the_middle_of_their_cell(seed: int, position: int) -> None:
    got = uniform(long(seed), long(position), 4)
    assert got.dtype == torch.float64
    assert bool(((got > 0) & (got < 1)).all())
    cells = [known_bits(seed, position, column, 0) >> 12 for column in range(4)]
    assert got[0].tolist() == [(cell + 0.5) / 2**52 for cell in cells]


@pytest.mark.parametrize("bits", [0, -1, 2**63 - 1, -(2**63)])
def test_extreme_bits_stay_inside_the_open_interval(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fledge.ops.noise.uniform_bits", lambda *_: long(bits)[None])
    value = float(uniform(long(0), long(0), 1))
    assert 0.0 < value < 1.0
    assert math.isfinite(float(gumbel(long(0), long(0), 1)))


@given(st.lists(st.tuples(seeds, positions), min_size=2, max_size=6), st.integers(1, 20))
def test_the_company_in_the_batch_does_not_matter(
    rows: list[tuple[int, int]], num_columns: int
) -> None:
    together = gumbel(long(*(s for s, _ in rows)), long(*(p for _, p in rows)), num_columns)
    for row, (seed, position) in zip(together, rows, strict=True):
        assert torch.equal(row, gumbel(long(seed), long(position), num_columns)[0])


@given(seeds, positions, st.integers(1, 10), st.integers(1, 10))
def test_a_column_does_not_depend_on_how_many_there_are(
    seed: int, position: int, few: int, more: int
) -> None:
    short = uniform_bits(long(seed), long(position), few)
    wide = uniform_bits(long(seed), long(position), few + more)
    assert torch.equal(wide[:, :few], short)


@given(
    st.lists(st.tuples(seeds, positions), min_size=1, max_size=4),
    st.lists(st.integers(0, 999), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_the_noise_of_given_columns_is_that_of_all(
    rows: list[tuple[int, int]], columns: list[int], stream: int
) -> None:
    seed_B, position_B = long(*(s for s, _ in rows)), long(*(p for _, p in rows))
    columns_BK = torch.stack([(long(*columns) + 7 * row) % 1000 for row in range(len(rows))])
    wanted_BK = gumbel(seed_B, position_B, 1000, stream).gather(1, columns_BK)
    assert torch.equal(gumbel_of(seed_B, position_B, columns_BK, stream), wanted_BK)


def chi_square_p(counts: Tensor) -> float:
    """P value of "all cells are equally likely"."""
    expected = counts.double().sum() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def pairs(axis: str) -> tuple[Tensor, Tensor]:
    """Uniform numbers and their neighbours one step along an axis, 40,000 of each."""
    if axis == "token":
        wide = uniform(long(*range(200)), long(*[3] * 200), 201)
        return wide[:, :-1].flatten(), wide[:, 1:].flatten()
    seed_B, position_B = torch.arange(400), torch.arange(400) % 7
    first = uniform(seed_B, position_B, 100)
    if axis == "seed":
        return first.flatten(), uniform(seed_B + 1, position_B, 100).flatten()
    if axis == "position":
        return first.flatten(), uniform(seed_B, position_B + 1, 100).flatten()
    return first.flatten(), uniform(seed_B, position_B, 100, stream=1).flatten()


@pytest.mark.parametrize("axis", ["seed", "position", "token", "stream"])
def test_neighbours_are_independent(axis: str) -> None:
    """Correlation, and a chi-square over an 8 x 8 grid of (number, neighbour)."""
    first, second = pairs(axis)
    count = first.numel()
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 4 / math.sqrt(count)
    cells = (first * 8).long() * 8 + (second * 8).long()
    assert chi_square_p(torch.bincount(cells, minlength=64)) > ALPHA


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_uniform_along_one_axis(axis: str) -> None:
    """Each axis alone is uniform: a fixed token over all seeds, a fixed seed over all tokens."""
    count = 20_000
    steps = torch.arange(count)
    fixed = torch.full_like(steps, 11)
    if axis == "token":
        values = uniform(long(5), long(2), count)[0]
    elif axis == "seed":
        values = uniform(steps, fixed, 1)[:, 0]
    else:
        values = uniform(fixed, steps, 1)[:, 0]
    assert chi_square_p(torch.bincount((values * 100).long(), minlength=100)) > ALPHA


def test_every_bit_is_fair() -> None:
    bits = uniform_bits(torch.arange(300), torch.zeros(300, dtype=torch.long), 100).flatten()
    for shift in range(64):
        share = ((bits >> shift) & 1).double().mean()
        assert abs(float(share) - 0.5) < 4.5 * 0.5 / math.sqrt(bits.numel())


def test_gumbel_has_its_mean_and_variance() -> None:
    noise = gumbel(torch.arange(500), torch.arange(500), 400)
    assert noise.dtype == torch.float64
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.015)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
