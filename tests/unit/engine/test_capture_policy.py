"""A capture is made where it pays, and requests share what was captured where it does not.

Catches: a batch that captures every size it passes through on its way down, plans that change the
shape of cycles although captured ones are as good, sizes that are never captured however long they
are wanted, and cycles that are awaited whenever drafting pauses.
"""

import time
from typing import Any

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.draft_plan import PLAIN
from fledge.engine.graphs import Graphs
from fledge.engine.pass_times import PassCurve, PassTimes
from fledge.ops.synthetic_walk import SyntheticWalk
from fledge.testing import tiny_head
from tests.lossless.support import greedy, pair, prompts, token_ids
from tests.unit.engine.fake_graphs import capturing

CHAIN = TreeSettings(depth=3, width=1, budget=3)
SIZES = [1, 16, 64, 512]


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**{"graphs": "on", "max_pass_tokens": 64, "tree": CHAIN, **changes})


def flat_times() -> PassTimes:
    """A machine on which drafts cost little."""
    return PassTimes(
        PassCurve(SIZES, [5e-3, 5e-3, 6e-3, 20e-3]), PassCurve(SIZES, [2e-4, 2e-4, 3e-4, 1e-3])
    )


def ending_in_turn(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, seed=i) for i in range(count)]


def verified_sizes(graphs: Graphs) -> set[int]:
    kinds: list[Any] = list(graphs._graphs)
    return {kind[1] for kind in kinds if kind[0] == "verify"}


@pytest.mark.parametrize("has_head", [True, False], ids=["head", "plain"])
def test_a_batch_that_shrinks_captures_nothing(
    monkeypatch: pytest.MonkeyPatch, has_head: bool
) -> None:
    """One size is captured, when it comes up; those below it are passed through too quickly."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97) if has_head else None
    engine = Engine(target, head, settings(max_requests=8, controller="fixed"))
    graphs = capturing(engine, monkeypatch)
    monkeypatch.setattr(Graphs, "launch_s", 1.0)
    asked = (prompts() * 2)[:8]
    answers = engine.generate(asked, ending_in_turn(8))
    sizes = verified_sizes(graphs)
    assert sizes == {8}
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    assert token_ids(answers) == token_ids(plain.generate(asked, ending_in_turn(8)))


def test_a_size_that_is_wanted_for_long_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    engine = Engine(target, settings=settings(max_requests=8))
    graphs = capturing(engine, monkeypatch)
    monkeypatch.setattr(Graphs, "launch_s", 0.0)
    asked = (prompts() * 2)[:8]
    params = [SamplingParams(max_tokens=4, ignore_eos=True)] * 7
    engine.generate(asked, [*params, SamplingParams(max_tokens=60, ignore_eos=True)])
    sizes = verified_sizes(graphs)
    assert {1, 8} <= sizes


def test_an_adaptive_engine_keeps_to_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """However plans change, whoever comes and goes."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97)
    engine = Engine(target, head, settings(max_requests=8), times=flat_times())
    capturing(engine, monkeypatch)
    engine.capture_ahead(budget_s=300.0)
    asked = prompts()
    for _ in range(3):
        answers = engine.generate(asked, SamplingParams(max_tokens=24))
        assert token_ids(answers) == greedy("llama", asked)
    stats = engine.stats
    assert stats.num_captured == stats.num_launched == 0
    assert stats.num_replayed > 50
    assert stats.capturing_s == 0
    engine.check_integrity()


def test_good_drafts_are_made_from_the_first_cycles_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's own probabilities say nothing; that its drafts are right is learned at once."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97)
    always = SyntheticWalk(0.95)
    engine = Engine(
        target, head, settings(max_requests=4), times=flat_times(), measured_with=always
    )
    capturing(engine, monkeypatch)
    engine.capture_ahead(budget_s=300.0)
    engine.generate(prompts()[:4], SamplingParams(max_tokens=40, ignore_eos=True))
    stats = engine.stats
    assert stats.accept_length is not None
    assert stats.accept_length > 2.8
    assert engine._cycle.ahead.num_drains == 0


def test_a_pause_of_drafting_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads along for some cycles without drafts; what it drafts later is the same."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97)
    engine = Engine(target, head, settings(max_requests=4, controller="fixed"))
    controller = engine._cycle.choice.controller
    choose, turns = controller.choose, [0]

    def every_third(load: Any) -> Any:
        turns[0] += 1
        return choose(load) if turns[0] % 3 == 0 else PLAIN

    monkeypatch.setattr(controller, "choose", every_third)
    asked = prompts()[:4]
    answers = engine.generate(asked, SamplingParams(max_tokens=24))
    assert token_ids(answers) == greedy("llama", asked)
    assert engine._cycle.ahead.num_drains == 0
    assert engine.stats.num_drafts > 0
    engine.check_integrity()


def test_a_long_pause_leaves_the_head_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads along for few cycles, and is left without a cycle being awaited for it."""
    _, target = pair("llama")
    head = tiny_head(target, draft_vocab_size=97)
    engine = Engine(target, head, settings(max_requests=4, controller="fixed"))
    controller, runs = engine._cycle.choice.controller, engine._cycle.ahead.steady._runs
    choose, turns = controller.choose, [0]

    def after_a_pause(load: Any) -> Any:
        turns[0] += 1
        return PLAIN if 3 <= turns[0] < 30 else choose(load)

    read_along, num_along = runs.read_along, [0]

    def counted(batch: Any) -> None:
        num_along[0] += 1
        read_along(batch)

    monkeypatch.setattr(controller, "choose", after_a_pause)
    monkeypatch.setattr(runs, "read_along", counted)
    asked = prompts()[:4]
    answers = engine.generate(asked, SamplingParams(max_tokens=60, ignore_eos=True))
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    assert token_ids(answers) == token_ids(
        plain.generate(asked, SamplingParams(max_tokens=60, ignore_eos=True))
    )
    assert num_along[0] == 8
    assert engine._cycle.ahead.num_drains == 1, "only drafting again is waited for"
    engine.check_integrity()


def test_no_first_token_waits_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a prompt behind the copy of what the prompt's last token said."""
    _, target = pair("llama")
    engine = Engine(
        target, tiny_head(target, draft_vocab_size=97), settings(max_requests=4, controller="fixed")
    )
    steady, drafter, times = engine._cycle.ahead.steady, engine._drafter, []
    remember = drafter.remember

    def timed(*arguments: Any) -> None:
        times.append(time.perf_counter())
        remember(*arguments)

    monkeypatch.setattr(drafter, "remember", timed)
    for prompt in prompts()[:2]:
        engine.add(engine.make_request(prompt, SamplingParams(max_tokens=4)))
    engine.step()
    (started,) = steady._started
    assert started.is_reading
    (told,) = times
    last_tick = started.clock._ticks[-1]
    assert isinstance(last_tick, float)
    assert last_tick <= told


@pytest.mark.parametrize(
    ("num_requests", "now", "expected"),
    [(3, 0, 4), (9, 0, 16), (200, 0, 256), (3, 256, 4), (5, 256, 256), (300, 256, 384)],
)
def test_sizes_of_batches(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, now: int, expected: int
) -> None:
    """Captured ones where they fit, but few requests do not begin with many places."""
    _, target = pair("llama")
    engine = Engine(target, settings=settings(max_requests=4))
    capturing(engine, monkeypatch)
    steady = engine._cycle.ahead.steady
    monkeypatch.setattr(steady._runs, "sizes", lambda *, is_drafting: {4, 256})
    assert steady._sizes.pick(num_requests, is_drafting=False, now=now) == expected
