"""Requests of an engine whose target tells from what it sees what it says, run and checked."""

import random
from typing import Any

from fledge import Engine, SamplingParams, TreeSettings
from fledge.engine.sequence import Sequence
from tests.unit.engine.oracle_target import POISON, answer

TREE = TreeSettings(depth=4, width=3, budget=10)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(length)]


def add(engine: Engine, asked: list[int], max_tokens: int = 20, **options: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **options.pop("params", {}))
    return engine.add(engine.make_request(asked, params), **options)


def run(engine: Engine, *, most_steps: int = 2000) -> None:
    for _ in range(most_steps):
        if not engine.has_work:
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError(f"there is still work after {most_steps} steps")


def check_answers(sequences: list[Sequence], window: int | None = None) -> None:
    for seq in sequences:
        assert seq.is_finished
        asked = list(seq.request.prompt_token_ids)
        assert seq.output_ids == answer(asked, len(seq.output_ids), window)


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.stats.cache_usage == 0
    engine.check_integrity()
