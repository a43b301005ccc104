"""Many requests whose cycles are read several at a time say what they say one by one.

Catches: tokens behind the end of an answer, tokens of one request in another, cycles that are not
counted, requests that join or end while cycles are in flight.
"""

import random
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams
from fledge.engine import cycle_groups
from fledge.engine.cycle_ahead import CycleAhead
from fledge.models.target import Target
from fledge.testing import target_of, tiny_model
from tests.lossless.support import token_ids


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama"))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cycles were read at once, each time; few requests count as many."""
    sizes: list[int] = []
    usual = CycleAhead._take_together

    def counted(self: CycleAhead, cycles: Any) -> None:
        sizes.append(len(cycles))
        usual(self, cycles)

    monkeypatch.setattr(CycleAhead, "_take_together", counted)
    monkeypatch.setattr(cycle_groups, "MANY_REQUESTS", 4)
    return sizes


def asked(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 90) for _ in range(draw.randrange(2, 30))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=draw.choice((1, 2, 3, 7, 20, 41)), temperature=draw.choice((0, 1)), seed=one
        )
        for one in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("max_requests", [6, 12])
def test_answers_and_counts_are_the_same(
    target: Target, together: list[int], max_requests: int
) -> None:
    prompts, params = asked(40)
    settings = EngineSettings(max_requests=max_requests, graphs="off")
    usual = Engine(target, settings=settings).generate(prompts, params)
    ahead = Engine(
        target, settings=EngineSettings(max_requests=max_requests, graphs="on")
    ).generate(prompts, params)
    assert max(together) == cycle_groups.CYCLES_TOGETHER
    assert token_ids(ahead) == token_ids(usual)
    for one, other in zip(ahead, usual, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.stats.accept_length == other.stats.accept_length


def test_stop_texts_end_answers_in_the_middle_of_what_was_read(
    target: Target, together: list[int]
) -> None:
    prompts, _ = asked(12)
    ends = [EngineSettings(graphs=graphs) for graphs in ("off", "on")]
    params = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=one, stop_token_ids=(11, 23, 37))
        for one in range(12)
    ]
    usual, ahead = (Engine(target, settings=one).generate(prompts, params) for one in ends)
    assert together
    assert {one.finish_reason for one in usual} == {"stop", "length"}
    assert token_ids(ahead) == token_ids(usual)


def test_logits_that_are_no_numbers_end_one_request_alone(
    target: Target, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found while cycles are read together: those are then taken one by one."""
    usual = cycle_groups.has_failures
    found: list[bool] = []

    def pretended(cycles: Any) -> bool:
        found.append(True)
        return len(found) == 2 or usual(cycles)

    monkeypatch.setattr(cycle_groups, "has_failures", pretended)
    prompts, params = asked(20)
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(prompts, params)
    ahead = Engine(target, settings=EngineSettings(graphs="on")).generate(prompts, params)
    assert len(found) > 2
    assert token_ids(ahead) == token_ids(plain)
