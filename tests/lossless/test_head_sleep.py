"""A head that sleeps, is examined and wakes changes no text, and nothing is awaited for it.

Catches: requests that are drafted for although their features were not kept, prefixes handed on
without what a head needs of them, graphs with features in cycles that keep none, and drafts for
those who join that are not those of a head that has read all of it.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine import exams
from fledge.engine.draft_plan import PLAIN, DraftPlan, Load
from fledge.engine.fixed_controller import FixedController
from fledge.engine.graphs import Graphs
from fledge.engine.sequence import Sequence
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from tests.engines.forced_pair import CIRCLE
from tests.lossless.support import token_ids
from tests.unit.engine.fake_graphs import capturing

Pair = tuple[Target, Eagle3Head]
TREES = {
    "tree": TreeSettings(depth=3, width=3, budget=9),
    "chain": TreeSettings(depth=3, width=1, budget=3),
}


class Restless(FixedController):
    """Sleeps, examines and drafts as it is told, or at random."""

    chance: random.Random | None = None
    is_asleep = is_exam = False

    def choose(self, load: Load) -> DraftPlan:
        if self.chance is not None and self.chance.random() < 0.3:
            return PLAIN
        return super().choose(load)

    def meets_requests(self, *, has_room: bool) -> bool:
        if self.chance is not None and has_room:
            self.is_exam = self.is_asleep and self.chance.random() < 0.5
            self.is_asleep = self.is_asleep and not self.is_exam
        return not self.is_asleep

    def turn(self) -> None:
        """Between two steps anything may come to an end."""
        if self.chance is not None and self.chance.random() < 0.15:
            self.is_asleep, self.is_exam = self.chance.choice([(True, False), (False, False)])

    @property
    def expects_drafts(self) -> bool:
        return not self.is_asleep


def restless(
    target: Target, head: Eagle3Head, shape: str = "tree", **changes: Any
) -> tuple[Engine, Restless]:
    tree = TREES[shape]
    settings = EngineSettings(**{"tree": tree, "graphs": "on", "max_requests": 4, **changes})
    engine = Engine(target, head, settings)
    controller = Restless(tree, max_pass_tokens=settings.max_pass_tokens)
    engine._controller = engine._cycle.choice.controller = controller
    return engine, controller


def spoil(engine: Engine) -> None:
    """Have the head's memory hold what never was: a device's memory is not cleared before."""
    engine.generate([[CIRCLE[0]] * 3], params(2))
    memory = engine._cache.head_memory
    for layer in memory.layer_ids:
        for rows in memory.layer(layer):
            rows.fill_(float("nan") if rows.is_floating_point() else 2**40)
    engine._cache.reset()


def has_bare(graphs: Graphs) -> bool:
    kinds: list[Any] = list(graphs._graphs)
    return "bare" in {kind[0] for kind in kinds}


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_texts(forced: Pair) -> dict[tuple[int, ...], list[int]]:
    """What the target says by itself to all that is asked at random."""
    asked = [[first] * 8 + [last] for first in CIRCLE[:4] for last in CIRCLE[:9]]
    engine = Engine(forced[0], settings=EngineSettings(graphs="off", max_requests=len(asked)))
    answers = engine.generate(asked, params(60))
    return {tuple(one): list(answer.token_ids) for one, answer in zip(asked, answers, strict=True)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "launched"])
@pytest.mark.parametrize("shape", TREES)
def test_whatever_the_head_does(
    forced: Pair,
    plain_texts: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    is_captured: bool,
    shape: str,
) -> None:
    target, head = forced
    chance = random.Random(seed)
    monkeypatch.setattr(exams, "NUM_EXAMINED", 1 + seed % 2)
    engine, controller = restless(target, head, shape, block_size=4, cache_tokens=600)
    if is_captured:
        capturing(engine, monkeypatch)
    spoil(engine)
    controller.chance = chance
    running: list[Sequence] = []
    for _ in range(260):
        if chance.random() < 0.12:
            asked = [CIRCLE[chance.randrange(4)]] * 8 + [CIRCLE[chance.randrange(9)]]
            running.append(engine.add(engine.make_request(asked, params(chance.randrange(2, 60)))))
        if running and chance.random() < 0.03:
            engine.preempt(chance.choice(running))
        controller.turn()
        engine.step()
        engine.check_integrity()
    while engine.has_work:
        engine.step()
    for seq in running:
        said = plain_texts[tuple(seq.request.prompt_token_ids)]
        assert seq.output_ids == said[: seq.request.params.max_tokens]
    assert engine.stats.num_drafts
    assert engine._cycle.ahead.steady.bare.num_bare
    engine.check_integrity()


@pytest.mark.parametrize("shape", TREES)
def test_an_exam_drafts_for_those_who_join_and_awaits_nothing(forced: Pair, shape: str) -> None:
    """Who came before goes on without drafts, though the head slept only in their first cycles."""
    target, head = forced
    engine, controller = restless(target, head, shape)
    spoil(engine)
    bare, ahead = engine._cycle.ahead.steady.bare, engine._cycle.ahead
    controller.is_asleep, num_told = True, bare.num_told

    def add(start: int) -> Sequence:
        return engine.add(engine.make_request([CIRCLE[start]] * 5, params(60)))

    early = add(0)
    for _ in range(6):
        engine.step()
    assert (bare.num_told, early.lacks_features) == (num_told, True)
    num_bare = bare.num_bare
    assert num_bare >= 5 + 4
    controller.is_asleep, controller.is_exam = False, True
    late = add(7)
    while not late.is_finished:
        engine.step()
    assert late.completion().stats.accept_length > 2, "its head has read all of it"
    assert not late.lacks_features
    assert bare.num_bare == num_bare
    while engine.has_work:
        engine.step()
    assert early.completion().stats.accept_length == 1
    assert ahead.num_drains == 0
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    for seq in (early, late):
        asked = list(seq.request.prompt_token_ids)
        assert seq.output_ids == token_ids(plain.generate([asked], seq.request.params))[0]


def test_asleep_cycles_are_those_of_an_engine_without_a_head(
    forced: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph is replayed again and again, the head hears nothing, and nothing is awaited."""
    target, head = forced
    engine, controller = restless(target, head)
    graphs = capturing(engine, monkeypatch)
    engine.capture_ahead(budget_s=300.0)
    controller.is_asleep = True
    bare, kinds = engine._cycle.ahead.steady.bare, set[str]()
    num_told = bare.num_told
    run, drafter = graphs.run, engine._drafter

    def watched(kind: Any, *arguments: Any, **options: Any) -> Any:
        kinds.add(kind[0])
        return run(kind, *arguments, **options)

    def told(*_: Any) -> None:
        raise AssertionError("the head was told")

    monkeypatch.setattr(graphs, "run", watched)
    monkeypatch.setattr(drafter, "remember", told)
    answers = engine.generate([[CIRCLE[start]] * 5 for start in range(3)], params(50))
    assert kinds == {"bare", "read bare"}
    assert engine.stats.num_captured == engine.stats.num_launched == 0
    assert engine._cycle.ahead.num_drains == 0
    assert bare.num_told == num_told
    assert bare.num_bare == 3 * (5 + 50), "who has ended runs a cycle too many"
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    asked = [[CIRCLE[start]] * 5 for start in range(3)]
    assert token_ids(answers) == token_ids(plain.generate(asked, params(50)))


class Operations(TorchDispatchMode):
    """What a device would be asked for: operations, and how large what they write is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
            sizes = tuple((tuple(one.shape), one.stride()) for one in tensors)
            self.seen.append((str(func), sizes))
        return made


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "launched"])
def test_an_exam_is_about_few_of_those_who_come(
    forced: Pair, monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    """The others keep what they share with those before them, and go on without drafts."""
    target, head = forced
    engine, controller = restless(target, head, max_requests=8, block_size=4)
    if is_captured:
        capturing(engine, monkeypatch)
        engine.capture_ahead(budget_s=300.0)
    spoil(engine)
    controller.is_asleep, known = True, [[CIRCLE[start]] * 9 for start in range(8)]
    engine.generate(known, params(1))
    controller.is_asleep, controller.is_exam = False, True
    bare = engine._cycle.ahead.steady.bare
    num_told, num_bare = bare.num_told, bare.num_bare
    short, *came = (
        engine.add(engine.make_request([*asked, CIRCLE[9]], params(40 if i else 1)))
        for i, asked in enumerate(known)
    )
    while not all(seq.output_ids for seq in came):
        engine.step()
    examined = [seq for seq in came if not seq.lacks_features]
    assert len(examined) == 4
    assert short.completion().stats.num_prompt_reused, "nobody is drafted for who says one token"
    assert bare.num_bare - num_bare <= 4 * 3, "the end of their prompts"
    assert bare.num_told - num_told <= 4 * 10 + 8 * 4, "whole prompts, and a few cycles"
    while engine.has_work:
        engine.step()
    plain = Engine(target, settings=EngineSettings(graphs="off"))
    for seq in came:
        asked = list(seq.request.prompt_token_ids)
        assert seq.output_ids == token_ids(plain.generate([asked], seq.request.params))[0]
        stats = seq.completion().stats
        assert (stats.accept_length > 2) is (seq in examined)
        assert (stats.num_prompt_reused == 0) is (seq in examined)
    engine.check_integrity()


@pytest.mark.parametrize("shape", TREES)
def test_asleep_cycles_ask_for_what_an_engine_without_a_head_does(
    forced: Pair, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Operation for operation: tables without room for drafts, no features, and prompts alike."""
    target, head = forced
    sleepy, controller = restless(target, head, shape, cache_tokens=600)
    plain = Engine(target, settings=replace(sleepy.settings, controller="fixed"))
    assert sleepy._cache.max_tokens > plain._cache.max_tokens, "drafts need room of their own"
    controller.is_asleep = True
    found = []
    for engine in (sleepy, plain):
        engine.generate([[CIRCLE[0]] * 5], params(4))  # tables and constants are made once
        operations = Operations()

        def recorded(work: Any, operations: Operations = operations) -> Any:
            def run(*arguments: Any, **options: Any) -> Any:
                with operations:
                    return work(*arguments, **options)

            return run

        steady = engine._cycle.ahead.steady
        monkeypatch.setattr(steady._runs._cycle, "verify", recorded(steady._runs._cycle.verify))
        monkeypatch.setattr(steady._reader, "_run", recorded(steady._reader._run))
        engine.generate([[CIRCLE[start]] * 5 for start in range(3)], params(6))
        found.append(operations.seen)
    assert len(found[0]) > 100
    assert found[0] == found[1]


def test_a_graph_without_features_is_captured_when_keeping_them_has_cost_as_much(
    forced: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = forced
    engine, controller = restless(target, head)
    graphs = capturing(engine, monkeypatch)
    controller.is_asleep = True
    bare = engine._cycle.ahead.steady.bare
    monkeypatch.setattr(type(graphs), "launch_s", 1e3)
    engine.generate([[CIRCLE[0]] * 5], params(30))
    assert not has_bare(graphs)
    assert bare.num_told >= 28, "no capture was paid for yet"
    monkeypatch.setattr(type(graphs), "launch_s", 1e-9)
    engine.generate([[CIRCLE[0]] * 5], params(30))
    assert has_bare(graphs)


def test_a_prefix_without_features_is_read_again_for_the_head(forced: Pair) -> None:
    """And is whole from then on: the third request finds all that it needs."""
    target, head = forced
    engine, controller = restless(target, head, block_size=4)
    controller.is_asleep = True
    asked = [CIRCLE[3]] * 18
    first = engine.add(engine.make_request(asked, params(8)))
    while not first.is_finished:
        engine.step()
    reused = []
    for is_asleep in (True, False, False):
        controller.is_asleep = is_asleep
        seq = engine.add(engine.make_request(asked, params(40)))
        while not seq.is_finished:
            engine.step()
        stats = seq.completion().stats
        reused.append(stats.num_prompt_reused)
        assert (stats.accept_length > 2) is not is_asleep
    assert reused == [17, 0, 17]
    engine.check_integrity()
