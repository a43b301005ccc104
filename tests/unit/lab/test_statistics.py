"""Intervals hold as often as they say, comparisons are paired, and few units are admitted."""

import numpy as np
import pytest

from fledge.lab.statistics import (
    Interval,
    bootstrap,
    mean_interval,
    percentile,
    percentiles,
    rate_ratio_difference,
    ratio_interval,
    t_quantile,
)

Pair = tuple[float, float, float, float]


@pytest.mark.parametrize(
    ("share", "freedom", "known"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 7, 2.3646), (0.95, 30, 1.6973)],
)
def test_quantiles_of_t_are_those_of_the_tables(share: float, freedom: int, known: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(known, rel=1e-3)
    assert t_quantile(0.975, 100_000) == pytest.approx(1.95996, rel=1e-3)


@pytest.mark.parametrize("count", [6, 20])
def test_intervals_of_a_mean_hold_as_often_as_they_say(count: int) -> None:
    source, trials = np.random.default_rng(5), 300
    held = sum(
        not mean_interval(source.normal(3.0, 1.0, count).tolist(), seed=i, draws=500).excludes(3.0)
        for i in range(trials)
    )
    # Binomial with p = 0.95: four standard deviations are 0.05.
    assert 0.90 <= held / trials <= 0.995


def pairs(source: np.random.Generator, *, count: int, speed: float) -> list[Pair]:
    """Prompts of very different lengths, their times with noise of 10%."""
    tokens = source.integers(20, 200, count)
    noise = source.normal(1.0, 0.1, (2, count))
    rate = source.normal(1.0, 0.15, count) * speed
    return [
        (float(n), float(n / r * a), float(n), float(n * b))
        for n, r, a, b in zip(tokens, rate, *noise, strict=True)
    ]


def test_intervals_of_a_speed_up_over_tasks_hold_as_often_as_they_say() -> None:
    source, trials, held = np.random.default_rng(6), 200, 0
    # What the figure comes to with very many prompts: a little off the rates, by their noise.
    true = ratio_interval(
        {
            "a": pairs(np.random.default_rng(1), count=50_000, speed=1.5),
            "b": pairs(np.random.default_rng(2), count=50_000, speed=2.5),
        },
        draws=2,
    ).value
    for i in range(trials):
        found = ratio_interval(
            {
                "a": pairs(source, count=8, speed=1.5),
                "b": pairs(source, count=12, speed=2.5),
            },
            seed=i,
            draws=500,
        )
        held += not found.excludes(true)
    assert 0.89 <= held / trials <= 0.999


def test_pairing_sees_differences_that_lengths_would_hide() -> None:
    source = np.random.default_rng(7)
    tokens = source.integers(10, 1000, 30).astype(float)
    plain_s = tokens * source.normal(1.0, 0.3, 30)
    fast, slow = plain_s / 2.0, plain_s / 1.9
    units_NC = np.stack([tokens, fast, tokens, plain_s, tokens, slow, tokens, plain_s], axis=1)
    found = bootstrap([units_NC], rate_ratio_difference)
    assert found.value == pytest.approx(0.1)
    assert found.excludes(0.0), "every prompt says the same, however different they are"


def test_equal_heads_cannot_be_told_apart() -> None:
    wrongly = 0
    for seed in range(100):
        source = np.random.default_rng(seed)
        columns = [np.full(10, 50.0) if i % 2 == 0 else source.normal(10, 1, 10) for i in range(8)]
        wrongly += bootstrap(
            [np.stack(columns, axis=1)], rate_ratio_difference, draws=500
        ).excludes(0.0)
    assert wrongly <= 12, "of 100 comparisons with a confidence of 95%"


def test_one_unit_says_nothing_about_others() -> None:
    found = mean_interval([4.0])
    assert (found.value, found.low, found.high, found.num_units) == (4.0, None, None, 1)
    assert not found.excludes(100.0)
    alone = ratio_interval({"a": [(1.0, 1.0, 1.0, 2.0)], "b": [(1.0, 1.0, 1.0, 4.0)] * 3})
    assert alone.value == pytest.approx(3.0)
    assert alone.low is None, "task a has one unit"


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [1.0, 2.0, 5.0, 3.0]
    assert mean_interval(values, seed=3) == mean_interval(values, seed=3)
    others = [mean_interval(values, seed=seed, draws=50) for seed in range(5)]
    assert len({other.low for other in others}) > 1
    assert mean_interval(values).to_json()["num_units"] == 4
    assert Interval(value=1.0, low=0.5, high=1.5, num_units=3).excludes(1.6)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentiles([float(n) for n in range(101)]) == {
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
    }
