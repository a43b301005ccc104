"""Requests that come while others decode join them without anything being waited for.

Catches: batches that are awaited whenever somebody comes or goes, tokens mixed up when requests
move to a batch of another size, tokens of an earlier stay that a request takes again, prompts read
with tokens that only fill a pass, and requests that wait for ever beside a batch.
"""

import random
from collections import Counter
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.sequence import Sequence
from fledge.engine.steady import Steady
from fledge.engine.steady_reading import pass_sizes
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.testing import tiny_head
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import pair, token_ids

Pair = tuple[Target, Eagle3Head]


def settings(**changes: Any) -> EngineSettings:
    tree = TreeSettings(depth=3, width=3, budget=9)
    return EngineSettings(**{"tree": tree, "graphs": "on", **changes})


def params(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


class Calls(Counter[str]):
    """How often the device was asked for something, and waited for."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._engine = engine
        for name in ("start", "read", "collect", "begin", "join"):
            monkeypatch.setattr(Steady, name, self._counted(name, getattr(Steady, name)))

    def _counted(self, name: str, method: Any) -> Any:
        def call(steady: Steady, *args: Any, **options: Any) -> Any:
            if name != "join" or args[0]:
                self[name] += 1
            return method(steady, *args, **options)

        return call

    @property
    def drains(self) -> int:
        return self._engine._cycle.ahead.num_drains

    @property
    def moves(self) -> int:
        return self._engine._cycle.ahead._steady.places.num_moves


@pytest.mark.parametrize("is_drafting", [True, False])
def test_who_comes_and_goes_costs_no_waiting(
    forced: Pair, monkeypatch: pytest.MonkeyPatch, is_drafting: bool
) -> None:
    """One pass over each prompt, one reading of each cycle by the host, and nothing else."""
    target, head = forced
    engine = Engine(target, head if is_drafting else None, settings(max_requests=8))
    calls = Calls(engine, monkeypatch)

    def add(start: int, max_tokens: int) -> Sequence:
        return engine.add(engine.make_request([CIRCLE[start % 30]] * 3, params(max_tokens)))

    stays = add(0, 400)
    others = [add(start, 9 + start) for start in range(1, 7)]
    for _ in range(4):
        engine.step()
    before, drains = Counter(calls), calls.drains
    assert drains <= 1, "drafting began once"
    num_joined = 0
    while num_joined < 20:
        while engine._scheduler.num_waiting < 1:
            others.append(add(7 + num_joined, 3 + num_joined % 11))
            num_joined += 1
        engine.step()
    made = Counter({name: calls[name] - before[name] for name in calls})
    assert calls.drains == drains
    assert made["begin"] == made["join"] == 0, "nothing was sent to the device again"
    assert made["read"] <= num_joined
    # Each cycle and each pass over prompts is read once; two may still be in flight.
    assert abs(made["collect"] - made["start"] - made["read"]) <= 2
    assert calls.moves <= 4, "places that become free are taken by those who come"
    assert not stays.has_ended
    engine.abort([stays])
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    for seq in others:
        start = CIRCLE.index(seq.request.prompt_token_ids[0])
        count = len(seq.output_ids)
        assert seq.output_ids == [CIRCLE[(start + 1 + i) % len(CIRCLE)] for i in range(count)]


@pytest.mark.parametrize(
    ("architecture", "has_head", "changes"),
    [
        ("llama", False, {"max_pass_tokens": 24}),
        ("llama", True, {"block_size": 4, "cache_tokens": 160, "max_pass_tokens": 40}),
        ("gemma3-hybrid", True, {"block_size": 4, "cache_tokens": 400}),
        pytest.param(
            "mistral-sliding",
            False,
            {"block_size": 4, "cache_tokens": 90, "max_pass_tokens": 48},
            marks=pytest.mark.slow,
        ),
        pytest.param("llama", True, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", True, {"share_prefixes": False}, marks=pytest.mark.slow),
    ],
)
def test_a_random_workload(architecture: str, has_head: bool, changes: dict[str, Any]) -> None:
    """Everything at once: all kinds of sampling, cancelling, priorities, little memory."""
    _, target = pair(architecture)
    head = tiny_head(target, draft_vocab_size=97) if has_head else None
    engine = Engine(target, head, settings(max_requests=6, **changes))
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    chance = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {},
        {"speculate": False},
        {"temperature": 0.8},
        {"temperature": 1.1, "top_k": 7},
        {"presence_penalty": 0.4},
        {"logprobs": 1},
    ]
    common = [chance.randrange(3, 97) for _ in range(20)]
    running: list[Sequence] = []
    cancelled: set[int] = set()
    for number in range(24):
        own = [chance.randrange(3, 97) for _ in range(chance.choice([1, 3, 9, 30]))]
        asked = common[: chance.choice([0, 0, 12, 20])] + own
        kind = chance.choice(kinds)
        wanted = params(chance.choice([1, 2, 6, 17]), seed=number, **kind)
        running.append(
            engine.add(engine.make_request(asked, wanted), priority=chance.choice([0, 0, 0, 1]))
        )
        for _ in range(chance.choice([0, 1, 2, 3])):
            engine.step()
            engine.check_integrity()
        if chance.random() < 0.1:
            victim = chance.randrange(len(running))
            engine.abort([running[victim]])
            cancelled.add(victim)
        if chance.random() < 0.15 and engine._scheduler.running:
            engine.preempt(chance.choice(engine._scheduler.running))
    for _ in range(5000):
        if not engine.has_work:
            break
        engine.step()
        engine.check_integrity()
    assert not engine.has_work
    ended = [seq for number, seq in enumerate(running) if number not in cancelled]
    assert all(seq.error is None and seq.is_finished for seq in ended)
    texts = plain.generate(
        [list(seq.request.prompt_token_ids) for seq in ended],
        [seq.request.params for seq in ended],
    )
    assert [seq.output_ids for seq in ended] == token_ids(texts)


def test_a_long_prompt_is_read_beside_those_who_decode(forced: Pair) -> None:
    target, head = forced
    engine = Engine(target, head, settings(max_pass_tokens=32, max_requests=4))
    first = engine.add(engine.make_request([CIRCLE[0]] * 3, params(300)))
    while len(first.output_ids) < 8:
        engine.step()
    drains = engine._cycle.ahead.num_drains
    long = engine.add(engine.make_request([CIRCLE[2]] * 150, params(5)))
    said = len(first.output_ids)
    num_steps = 0
    while not long.output_ids:
        engine.step()
        num_steps += 1
    assert num_steps >= 150 // 32
    assert len(first.output_ids) >= said + num_steps - 1, "it went on meanwhile"
    assert engine._cycle.ahead.num_drains == drains
    engine.abort([first, long])
    engine.check_integrity()


def test_sizes_of_passes() -> None:
    assert pass_sizes(1024) == [32, 64, 128, 256, 384, 512, 768, 1024]
    assert pass_sizes(700) == [32, 64, 128, 256, 384, 512, 700]
    assert pass_sizes(20) == [20]
