"""Captured cycles on CUDA say what one ordinary cycle after the other says."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.graphs import Graphs
from fledge.engine.pass_times import PassCurve, PassTimes
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.testing import tiny_head
from tests.engines.forced_pair import CIRCLE, save_forced_head, save_forced_target
from tests.lossless.support import PROMPT_LENS, prompts, token_ids
from tests.lossless.test_steady import MIXES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SHAPES = {"chain": (4, 1, 4), "tree": (5, 4, 24)}


def settings_of(shape: str, **changes: Any) -> EngineSettings:
    depth, width, budget = SHAPES[shape]
    tree = TreeSettings(depth=depth, width=width, budget=budget)
    return EngineSettings(tree=tree, graphs="on", **changes)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_forced_pair(tmp_path: Path, shape: str) -> None:
    target = Target.load(save_forced_target(tmp_path / "t"), dtype=torch.float32, device=CUDA)
    head = load_head(save_forced_head(tmp_path / "h"))
    asked = [[CIRCLE[start]] * 3 for start in (0, 7, 15, 22, 29)]
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    settings = settings_of(shape)
    plain = Engine(target, settings=replace(settings, graphs="off")).generate(asked, params)
    usual = Engine(target, head, replace(settings, graphs="off")).generate(asked, params)
    ahead = Engine(target, head, settings).generate(asked, params)
    assert token_ids(ahead) == token_ids(usual) == token_ids(plain)
    for one, other in zip(ahead, usual, strict=True):
        assert one.stats.accept_length > 2
        assert one.stats.accept_length == pytest.approx(other.stats.accept_length, rel=0.2)
    one_by_one = Engine(target, head, settings)
    for prompt, other in zip(asked[:3], usual, strict=False):
        (one,) = one_by_one.generate([prompt], params)
        assert one.stats.accept_length == pytest.approx(other.stats.accept_length, rel=0.2)
    alone = Engine(target, settings=settings).generate(asked, params)
    assert token_ids(alone) == token_ids(plain)


def test_copied_chains(tmp_path: Path) -> None:
    """The device finds what was said before by itself, in captured cycles too."""
    target = Target.load(save_forced_target(tmp_path / "t"), dtype=torch.float32, device=CUDA)
    asked = [[*CIRCLE, *CIRCLE[: 7 + start]] for start in (0, 3, 9)]
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    settings = settings_of("chain", controller="fixed")
    plain = Engine(target, settings=replace(settings, graphs="off")).generate(asked, params)
    for graphs in ("off", "on"):
        engine = Engine(target, tiny_head(target), replace(settings, graphs=graphs))
        for _ in range(2):
            assert token_ids(engine.generate(asked, params)) == token_ids(plain)
        stats = engine.stats
        assert stats.num_copies_accepted == stats.num_copies_offered > 600
    assert stats.num_replayed


@pytest.mark.parametrize("mixes", [MIXES[:2], MIXES], ids=["free", "filtered"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_sampled_and_greedy(architecture: str, mixes: tuple[dict[str, Any], ...]) -> None:
    from fledge.testing import target_of, tiny_model

    target = target_of(tiny_model(architecture).to(CUDA))
    asked = prompts()
    params = [
        SamplingParams(max_tokens=20 + 9 * i, seed=i, **mixes[i % len(mixes)])
        for i in range(len(PROMPT_LENS))
    ]
    off = EngineSettings(graphs="off")
    plain = Engine(target, settings=off).generate(asked, params)
    head = tiny_head(target, draft_vocab_size=97)
    for settings in (settings_of("tree"), settings_of("chain", max_requests=3)):
        found = token_ids(Engine(target, head, settings).generate(asked, params))
        assert found == token_ids(plain)


def test_filters_without_a_head_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    from fledge.testing import target_of, tiny_model

    target = target_of(tiny_model("llama").to(CUDA))
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, top_k=20, seed=seed)
        for seed in range(len(PROMPT_LENS))
    ]
    usual = Engine(target, settings=EngineSettings(graphs="off")).generate(prompts(), params)
    ahead = Engine(target, settings=EngineSettings(graphs="on")).generate(prompts(), params)
    assert token_ids(ahead) == token_ids(usual)
    assert "cannot be captured" not in caplog.text


def test_a_graph_does_what_was_captured() -> None:
    graphs, value = Graphs(CUDA), torch.zeros(3, device=CUDA)

    def work() -> torch.Tensor:
        value.add_(1)
        return value * 2

    results = [graphs.run("more", work) for _ in range(4)]
    assert [number for _, number in results] == [None, 1, 1, 1]
    assert value.tolist() == [4, 4, 4]
    assert results[-1][0].tolist() == [8, 8, 8]
    assert len(graphs) == 1


def test_work_that_cannot_be_captured_is_done_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs, value = Graphs(CUDA), torch.zeros(1, device=CUDA)

    def work() -> float:
        value.add_(1)
        return value.item()

    assert [graphs.run("asking", work)[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert "cannot be captured here" in caplog.text


def test_a_graph_may_be_forgotten_while_the_device_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver frees it when it is done; what it computes is right all the same."""
    monkeypatch.setattr("fledge.engine.graphs._MOST_GRAPHS", 1)
    graphs = Graphs(CUDA)
    matrix = torch.eye(4096, device=CUDA)
    value = torch.arange(4096.0, device=CUDA)[:, None].repeat(1, 4096)
    outcome = torch.zeros_like(value)

    def slow() -> None:
        found = value
        for _ in range(100):
            found = matrix @ found
        outcome.copy_(found)

    other = torch.zeros(1, device=CUDA)
    for _ in range(2):
        graphs.run("slow", slow)
    torch.cuda.synchronize()
    outcome.zero_()
    graphs.run("other", lambda: other.add_(1))
    graphs.run("slow", slow)
    graphs.run("other", lambda: other.add_(1))  # takes its place while it runs
    assert len(graphs) == 1
    assert torch.equal(outcome, value)
    assert other.item() == 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "qwen3-moe"])
@pytest.mark.parametrize("has_head", [True, False], ids=["head", "plain"])
def test_requests_come_and_go(architecture: str, has_head: bool) -> None:
    """Prompts are read in captured passes beside captured cycles, and nothing is awaited."""
    from fledge.testing import target_of, tiny_model

    target = target_of(tiny_model(architecture).to(CUDA))
    head = tiny_head(target, draft_vocab_size=97) if has_head else None
    engine = Engine(target, head, settings_of("chain", max_requests=6, max_pass_tokens=64))
    chance = random.Random(3)
    asked = [
        [chance.randrange(3, 97) for _ in range(chance.choice([2, 9, 40, 100]))] for _ in range(40)
    ]
    params = [
        SamplingParams(
            max_tokens=chance.choice([1, 5, 14, 30]), ignore_eos=True, seed=i, **MIXES[i % 2]
        )
        for i in range(len(asked))
    ]
    running = []
    for prompt, wanted in zip(asked, params, strict=True):
        running.append(engine.add(engine.make_request(prompt, wanted)))
        for _ in range(chance.choice([0, 1, 4])):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    assert [seq.output_ids for seq in running] == token_ids(plain)
    assert engine._cycle.ahead.num_drains <= 3, "where drafting begins, and there alone"


@pytest.mark.parametrize("has_head", [True, False], ids=["head", "plain"])
def test_captures_ahead_of_the_first_request(has_head: bool) -> None:
    from fledge.testing import target_of, tiny_model

    target = target_of(tiny_model("llama").to(CUDA))
    head = tiny_head(target, draft_vocab_size=97) if has_head else None
    settings = settings_of("chain", max_requests=8, max_pass_tokens=256, controller="fixed")
    engine = Engine(target, head, settings)
    assert engine.capture_ahead(budget_s=300) > 0
    graphs = engine._cycle.ahead.steady._graphs
    num_cold = graphs.num_cold
    asked, params = prompts(), SamplingParams(max_tokens=40, ignore_eos=True)
    answers = engine.generate(asked, params)
    assert graphs.num_cold == num_cold, "something was compiled or captured while requests waited"
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    assert token_ids(answers) == token_ids(plain)
    engine.check_integrity()


def test_a_head_that_sleeps_and_is_examined(tmp_path: Path) -> None:
    """Cycles without features are replayed; in an exam those who join are drafted for alone."""
    target = Target.load(save_forced_target(tmp_path / "t"), dtype=torch.float32, device=CUDA)
    head = load_head(save_forced_head(tmp_path / "h"))
    engine = Engine(target, head, settings_of("chain", max_requests=4, max_pass_tokens=64))
    assert engine.capture_ahead(budget_s=300) > 0
    controller: Any = engine._cycle.choice.controller
    bare = engine._cycle.ahead.steady.bare
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    controller.is_asleep, num_told = True, bare.num_told
    early = engine.add(engine.make_request([CIRCLE[0]] * 5, params))
    for _ in range(20):
        engine.step()
    assert (bare.num_told, early.lacks_features) == (num_told, True)
    controller.is_asleep, controller.is_exam = False, True
    late = engine.add(engine.make_request([CIRCLE[7]] * 5, params))
    while engine.has_work:
        engine.step()
    assert early.completion().stats.accept_length == 1
    assert late.completion().stats.accept_length > 2
    assert engine._cycle.ahead.num_drains == engine.stats.num_captured == 0
    asked = [[CIRCLE[0]] * 5, [CIRCLE[7]] * 5]
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    assert [early.output_ids, late.output_ids] == token_ids(plain)


def test_an_adaptive_engine_keeps_to_what_was_captured() -> None:
    from fledge.testing import target_of, tiny_model

    target = target_of(tiny_model("llama").to(CUDA))
    head = tiny_head(target, draft_vocab_size=97)
    settings = settings_of("chain", max_requests=4, max_pass_tokens=256)
    sizes = [1, 8, 64, 256]
    times = PassTimes(
        PassCurve(sizes, [1e-3, 1e-3, 2e-3, 6e-3]), PassCurve(sizes, [1e-4, 1e-4, 2e-4, 6e-4])
    )
    engine = Engine(target, head, settings, times=times)
    assert engine.capture_ahead(budget_s=300) > 0
    asked, params = prompts(), SamplingParams(max_tokens=60, ignore_eos=True)
    answers = engine.generate(asked, params)
    stats = engine.stats
    assert stats.num_replayed > 0
    assert stats.num_captured == stats.num_launched == 0
    plain = Engine(target, settings=EngineSettings(graphs="off")).generate(asked, params)
    assert token_ids(answers) == token_ids(plain)
    engine.check_integrity()
