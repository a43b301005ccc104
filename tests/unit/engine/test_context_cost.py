"""What cached tokens cost is learned from passes of the same size, whatever their rows take."""

import random

import pytest

from fledge.engine.context_cost import ContextCost
from fledge.engine.pass_times import PassCurve, PassTimes

TRUE_S = 30e-9
ROWS_S = {64: 5e-3, 256: 8e-3, 512: 15e-3}


def serve(observe: object, *, stutters: bool = False) -> None:
    """Requests grow from 128 to 384 tokens; sizes of passes take turns."""
    chance = random.Random(0)
    assert callable(observe)
    for length in range(128, 384):
        num_rows = chance.choice(list(ROWS_S))
        context_tokens = min(num_rows, 256) * length
        seconds = ROWS_S[num_rows] + TRUE_S * context_tokens
        seconds *= 1.0 + 0.01 * chance.gauss(0.0, 1.0)
        if stutters and chance.random() < 0.02:
            seconds *= 5.0
        observe(num_rows, seconds, context_tokens)


@pytest.mark.parametrize("measured_s", [0.0, 30e-9, 200e-9])
@pytest.mark.parametrize("stutters", [False, True])
def test_passes_of_one_size_tell(measured_s: float, stutters: bool) -> None:
    cost = ContextCost(measured_s)
    serve(cost.observe, stutters=stutters)
    assert cost.token_s == pytest.approx(TRUE_S, rel=0.35)


@pytest.mark.parametrize("slow_pass", [0, 1, 2])
def test_a_stutter_among_the_first_passes_is_not_the_price_of_cached_tokens(slow_pass: int) -> None:
    cost = ContextCost(TRUE_S)
    for number in range(4):
        context_tokens = 20_000 if number % 2 else 4_000
        seconds = 0.3 if number == slow_pass else 10e-3 + TRUE_S * context_tokens
        cost.observe(16, seconds, context_tokens)
    assert cost.token_s < 5 * TRUE_S


def test_short_contexts_leave_what_was_measured() -> None:
    cost = ContextCost(40e-9)
    for length in range(128, 384):
        cost.observe(1, 4e-3 + 1e-4 * (length % 7), length)
    assert cost.token_s == pytest.approx(40e-9, rel=0.05)


def test_few_sizes_are_remembered() -> None:
    cost = ContextCost(0.0)
    for num_rows in range(1, 2000):
        cost.observe(num_rows, 1e-3, 100)
    assert len(cost.usual_contexts()) <= 128


def test_all_sizes_are_judged_anew_when_cached_tokens_turn_out_cheaper() -> None:
    """A size that is no longer seen must not be left with what it was thought to owe to them."""
    times = PassTimes(PassCurve(list(ROWS_S), list(ROWS_S.values())), context_s=200e-9)
    for _ in range(30):
        times.refine(256, ROWS_S[256] + TRUE_S * 32_000, 32_000)
    for length in range(128, 384):
        times.refine(512, ROWS_S[512] + TRUE_S * 256 * length, 256 * length)
    assert times.context_s == pytest.approx(TRUE_S, rel=0.2)
    for tokens in (32_000, 90_000):
        true_s = ROWS_S[256] + TRUE_S * tokens
        assert times.target_s(256, tokens) == pytest.approx(true_s, rel=0.1)


def test_what_is_kept_on_disk_is_what_was_measured() -> None:
    times = PassTimes(PassCurve(list(ROWS_S), list(ROWS_S.values())), context_s=200e-9)
    before = times.to_json()
    serve(times.refine)
    assert times.to_json() == before
