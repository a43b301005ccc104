"""What is captured before the first request; the capture itself is tested where there is a device.

Catches: sizes that come up in the first requests and were not captured, memory or statistics that
rehearsals leave behind, and a start that goes on when its time or its memory is used up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.progress import SilentProgress, Task
from fledge.engine.steady_batch import Filters, SteadyBatch
from fledge.ops.noised_top import Draws
from fledge.ops.sampling import SamplingBatch
from fledge.ops.synthetic_walk import SyntheticWalk
from fledge.testing import tiny_head
from tests.lossless.support import greedy, pair, prompts, token_ids
from tests.unit.engine.fake_graphs import capturing


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[tuple[str, int | None]] = []

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        self.tasks.append((label, total))
        with super().task(label, total, unit) as task:
            yield task

    def note(self, text: str) -> None:
        self.lines.append(text)


SETTINGS = EngineSettings(
    graphs="on",
    max_requests=4,
    max_pass_tokens=64,
    tree=TreeSettings(depth=2, width=2, budget=3),
    controller="fixed",
)


def test_nothing_is_left_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    engine, notes = Engine(target, settings=SETTINGS), Notes()
    graphs = capturing(engine, monkeypatch)
    num_graphs = engine.capture_ahead(notes)
    assert num_graphs == len(graphs) > 0
    assert notes.lines == []
    assert [label for label, _ in notes.tasks] == ["capturing cycles"]
    assert engine.stats.num_passes == engine.stats.num_finished == 0
    assert engine.stats.cache_usage == engine.stats.num_kept_tokens == 0
    num_cold = graphs.num_cold
    asked = prompts()[:4]
    assert token_ids(engine.generate(asked, SamplingParams(max_tokens=24))) == greedy(
        "llama", asked
    )
    sampled = SamplingParams(max_tokens=9, temperature=0.8)
    engine.generate(asked[:3], sampled)
    assert graphs.num_cold == num_cold
    engine.check_integrity()


def test_cycles_with_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    engine = Engine(target, tiny_head(target, draft_vocab_size=97), SETTINGS)
    graphs = capturing(engine, monkeypatch)
    engine.capture_ahead()
    kinds: list[Any] = list(graphs._graphs)
    drafts = {kind[1] for kind in kinds if kind[0] == "draft"}
    assert drafts == {1, 2, 4}, "three requests share four places"
    read = {kind[2] for kind in kinds if kind[0] == "tell"}
    assert read == {True, False}, "prompts with the head and without"
    verified = [kind[1] for kind in kinds if kind[0] == "verify" and kind[2] is not None]
    assert sorted(verified) == [1, 1, 2, 2, 4, 4], "greedy requests, and sampled ones"
    with_noise = {(kind[1], kind[-1]) for kind in kinds if kind[0] == "draft"}
    assert with_noise == {(size, noise) for size in (1, 2, 4) for noise in (False, True)}
    num_cold, asked = graphs.num_cold, prompts()[:4]
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=0.8)):
        wanted = token_ids(Engine(target).generate(asked, params))
        assert token_ids(engine.generate(asked, params)) == wanted
    assert graphs.num_cold == num_cold


def test_drafts_that_know_no_noise_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    head, chance = tiny_head(target, draft_vocab_size=97), SyntheticWalk(0.5)
    engine = Engine(target, head, SETTINGS, measured_with=chance)
    graphs = capturing(engine, monkeypatch)
    engine.capture_ahead()
    kinds: list[Any] = list(graphs._graphs)
    assert {kind[-1] for kind in kinds if kind[0] == "draft"} == {False}


def test_it_ends_when_its_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    engine, notes = Engine(target, settings=SETTINGS), Notes()
    capturing(engine, monkeypatch)
    engine.capture_ahead(notes, budget_s=0.0)
    (line,) = notes.lines
    assert line.startswith("0 of ")
    assert "the time for it is used up" in line


def test_it_ends_when_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair("llama")
    engine, notes = Engine(target, settings=SETTINGS), Notes()
    capturing(engine, monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine._cycle.ahead.steady._reader, "rehearse", fail)
    engine.capture_ahead(notes)
    (line,) = notes.lines
    assert "the device's memory is used up" in line
    asked = prompts()[:1]
    assert token_ids(engine.generate(asked, SamplingParams(max_tokens=24))) == greedy(
        "llama", asked
    )


def test_nothing_is_done_where_nothing_is_captured() -> None:
    _, target = pair("llama")
    notes = Notes()
    assert Engine(target, settings=SETTINGS).capture_ahead(notes) == 0
    assert notes.tasks == notes.lines == []


def test_rehearsals_sample_where_graphs_are_for_sampled_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are checked then, and rows that take the best token would prove nothing."""
    _, target = pair("llama")
    engine = Engine(target, tiny_head(target), SETTINGS)
    capturing(engine, monkeypatch)
    seen: set[tuple[str, bool, bool]] = set()
    sampling, draws = SteadyBatch.sampling, SteadyBatch.draws

    def watched_sampling(batch: SteadyBatch, filters: Filters) -> SamplingBatch:
        seen.add(("verify", filters.can_sample, bool(batch.is_greedy_B.any())))
        return sampling(batch, filters)

    def watched_draws(batch: SteadyBatch, sampled_B: Tensor) -> Draws:
        seen.add(("draft", True, not sampled_B.all()))
        return draws(batch, sampled_B)

    monkeypatch.setattr(SteadyBatch, "sampling", watched_sampling)
    monkeypatch.setattr(SteadyBatch, "draws", watched_draws)
    steady = engine._cycle.ahead.steady
    steady.capture_ahead(SilentProgress(), budget_s=300.0, is_measured=False)
    assert seen == {("verify", False, True), ("verify", True, False), ("draft", True, False)}
    asked = prompts(3)
    answers = engine.generate(asked, SamplingParams(max_tokens=20))
    assert token_ids(answers) == greedy("llama", asked, max_tokens=20)
