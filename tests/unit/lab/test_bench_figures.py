"""Figures and comparisons by hand-made times: exact, without a clock."""

import math
from typing import Any

import pytest

from fledge.contracts.bench_settings import BenchSettings, parse_slo
from fledge.contracts.errors import ConfigError
from fledge.lab.bench_document import make_document
from fledge.lab.bench_figures import is_within, measure
from fledge.lab.bench_journal import Measurement
from fledge.lab.bench_statistics import correlation, crossing, ratio_of_repeats, repeats_interval
from fledge.lab.load_answer import Answer, Failure, Speculation
from fledge.lab.load_driver import ClientLoad, Drive
from fledge.lab.load_point import Point

IDLE = ClientLoad(busy_share=0.1, lag_s=0.0, chunks=10)


def answer(
    due: float, *times: float, tokens: int | None = None, sent: float | None = None
) -> Answer:
    count = len(times) if tokens is None else tokens
    begun = due if sent is None else sent
    return Answer(due=due, sent=begun, text_times=times, end=times[-1], num_tokens=count)


def figures(answers: list[Answer], point: Point | None = None, **settings: Any) -> dict[str, Any]:
    drive = Drive(answers=answers, client=IDLE)
    return measure(drive, point or Point("closed", 1), BenchSettings(**settings))


def test_rates_and_percentiles() -> None:
    found = figures([answer(0, 1, 2, 3), answer(3, 4, 6, 8)])
    assert found["seconds"] == 8
    assert found["tokens"] == 6
    assert found["tokens_per_s"] == 6 / 8
    assert found["ttft_s"] == {"mean": 1, "p50": 1, "p90": 1, "p95": 1, "p99": 1}
    assert found["tpot_s"]["p50"] == 1.5
    assert found["user_tokens_per_s"] == pytest.approx(1 / 1.5)
    assert found["itl_s"]["p50"] == 1.5
    assert found["itl_s"]["p99"] == pytest.approx(2.0)
    assert found["e2e_s"]["mean"] == 4
    # The steady rate ends where the last request is sent: three tokens in three seconds.
    assert found["steady_tokens_per_s"] == 1.0


def test_latency_counts_from_the_due_time() -> None:
    found = figures([answer(0, 5, 6, sent=4)], Point("poisson", 1.0))
    assert found["ttft_s"]["p50"] == 5
    assert found["steady_tokens_per_s"] is None


def test_goodput_and_cost() -> None:
    answers = [answer(0, 0.4, 0.42, 0.44), answer(1, 2.0, 2.01, 2.02), answer(2, 2.1, 2.4, 4.0)]
    found = figures(
        answers,
        slo=parse_slo("ttft=500ms,tpot=0.03s"),
        gpu_prices={"H200": 3.6, "spot": 1.8},
        gpus=2,
    )
    assert found["goodput_per_s"] == 1 / 4.0
    rate = found["steady_tokens_per_s"]
    assert found["cost_per_million_tokens"] == {
        "H200": pytest.approx(3.6 * 2 / (rate * 3600) * 1e6),
        "spot": pytest.approx(1.8 * 2 / (rate * 3600) * 1e6),
    }
    assert figures(answers)["goodput_per_s"] is None
    assert is_within(answers[0], {"itl": 0.021, "e2e": 0.45})
    assert not is_within(answers[2], {"itl": 0.5})
    assert is_within(answer(0, 1.0, tokens=1), {"tpot": 0.001})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo": {"speed": "1s"}}, "a service level cannot limit 'speed'; it may limit ttft,"),
        ({"slo": {"ttft": "fast"}}, "the limit of ttft is 'fast'; it must be like 500ms or 0.5s"),
        ({"slo": {"ttft": "0ms"}}, "the limit of ttft is '0ms'; it must be like"),
        ({"gpu_prices": {"x": 0.0}}, "the price of x is 0.0; it must be positive"),
        ({"concurrency": ()}, "there is no load: give concurrency, rates, or both"),
        ({"concurrency": (0,)}, "concurrency has 0; it must be between 1 and 4096"),
        ({"concurrency": (2, 2)}, "concurrency names the same load twice: (2, 2)"),
        ({"rates": (0.0,)}, "rates has 0.0; it must be positive"),
        ({"repeats": 0}, "repeats is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be 0 or positive"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or positive"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be positive"),
        ({"prompt_len": 4, "shared_prefix_len": 4}, "must be shorter than the prompts"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BenchSettings(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize("typed", ["", "ttft", "ttft=1s,ttft=2s"])
def test_a_service_level_has_a_form(typed: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form ttft=500ms,tpot=30ms"):
        parse_slo(typed)


def test_failures_are_counted_and_left_out() -> None:
    failed = Answer(due=0, sent=0, end=9, failure=Failure(kind="busy", reason="full"))
    found = figures([failed, answer(0, 1, 2), failed])
    assert found["errors"] == {"busy": {"count": 2, "example": "full"}}
    assert (found["requests"], found["good"], found["tokens"]) == (3, 1, 2)
    assert found["tokens_per_s"] == 2 / 9
    nothing = figures([failed])
    assert nothing["ttft_s"] is None
    assert nothing["user_tokens_per_s"] is None


def test_accept_length_is_tokens_of_cycles_over_cycles() -> None:
    def told(tokens: int, cycles: int, offered: tuple[int, ...], accepted: tuple[int, ...]) -> Any:
        said = Speculation(cycles=cycles, offered_at_depth=offered, accepted_at_depth=accepted)
        return Answer(
            due=0, sent=0, text_times=(1.0, 2.0), end=2, num_tokens=tokens, speculation=said
        )

    found = figures([told(7, 2, (2, 2), (2, 1)), told(5, 4, (4,), (0,))])
    assert found["accept_length"] == (6 + 4) / 6
    assert found["acceptance_at_depth"] == [2 / 6, 1 / 2]
    assert figures([answer(0, 1)])["accept_length"] is None


def test_intervals_are_students() -> None:
    one = repeats_interval([1.0, 2.0, 3.0])
    assert one is not None
    assert one.value == 2
    # t for two degrees of freedom is 4.303; the spread is 1.
    assert one.high == pytest.approx(2 + 4.3027 / math.sqrt(3), rel=1e-3)
    assert repeats_interval([]) is None
    alone = repeats_interval([5.0])
    assert alone is not None
    assert (alone.value, alone.low) == (5.0, None)
    ratio = ratio_of_repeats([2.0, 8.0], [1.0, 2.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(math.sqrt(2 * 4))


def test_correlation() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 1, -1]) == pytest.approx(-1)
    assert correlation([1, 2], [1, 2]) is None
    assert correlation([1, 2, 3], [5, 5, 5]) is None


@pytest.mark.parametrize(
    ("ratios", "where"),
    [
        ([2.0, 1.5, 1.1], None),
        ([2.0, 0.5, 0.4], math.sqrt(1 * 4)),
        ([0.9, 0.8, 2.0], 1),
        ([2.0, 1.0, 0.5], 4),
        ([], None),
    ],
)
def test_crossing(ratios: list[float], where: float | None) -> None:
    found = crossing([1, 4, 16][: len(ratios)], ratios)
    assert found == (None if where is None else pytest.approx(where))


def run(arm: str, level: int, repeat: int, tokens_per_s: float, **client: float) -> Measurement:
    found = figures([answer(0, 1, 2)])
    found |= {"steady_tokens_per_s": None, "tokens_per_s": tokens_per_s}
    found["tpot_s"] = {**found["tpot_s"], "p50": 1 / tokens_per_s}
    found["client"] |= client
    return Measurement(arm=arm, point=Point("closed", level), repeat=repeat, figures=found)


def test_arms_are_compared_repeat_by_repeat() -> None:
    measured = [
        run(arm, level, repeat, base * day * gain)
        for repeat, day in enumerate((1.0, 3.0, 2.0))
        for level, base, with_head in ((1, 10.0, 2.0), (4, 30.0, 1.25), (16, 90.0, 0.8))
        for arm, gain in (("plain", 1.0), ("head", with_head))
    ]
    arms = [{"name": "plain"}, {"name": "head"}]
    document = make_document(measured, arms=arms, head={}, is_complete=True)
    (comparison,) = document["comparisons"]
    # Days differ by a factor of three, pairs do not at all.
    for row, gain in zip(comparison["rows"], (2.0, 1.25, 0.8), strict=True):
        assert row["speedup"]["value"] == pytest.approx(gain)
        assert row["speedup"]["low"] == pytest.approx(gain)
        assert row["tpot_speedup"]["value"] == pytest.approx(gain)
    part = math.log(1.25) / math.log(1.25 / 0.8)
    assert comparison["crossover"]["concurrency"] == pytest.approx(4 * 4**part)
    assert [row["tokens_per_s"]["value"] for row in document["rows"]][:3] == [20, 60, 180]
    assert document["warnings"] == []


def test_a_client_that_is_the_bottleneck_is_named() -> None:
    measured = [
        run("plain", 1, 0, 10.0, busy_share=0.9),
        run("plain", 2, 0, 10.0, lag_p99_s=0.05),
    ]
    client = {"most_chunks_per_s": 8000.0}
    document = make_document(
        measured, arms=[{"name": "plain"}], head={"client": client}, is_complete=True
    )
    busy, late = document["warnings"]
    assert "the client was busy up to 90% of the time (it can take 8,000 chunks/s)" in busy
    assert busy.endswith("plain at closed 1.")
    assert "the client was up to 50.0 ms late" in late
    assert late.endswith("plain at closed 2.")


def test_tokens_that_nobody_counted_are_said() -> None:
    arms = [{"name": "a", "tokens": "chunks"}, {"name": "b", "tokens": "usage"}]
    document = make_document([run("a", 1, 0, 10.0)], arms=arms, head={}, is_complete=True)
    (warning,) = document["warnings"]
    assert warning.startswith("a does not say how many tokens it sends, and every chunk was")
