"""Pass times come from real passes of the right size, are kept, and are not confused.

Catches: a time that includes what prepares the pass, a pass of another size than asked, minutes
spent on filling a context nobody reads, copies of one token, times of one head used for another.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine import timing
from fledge.engine.timing import _PassTimer, measure_pass_times
from fledge.models.head_files import save_head
from fledge.models.target import Target
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model

SETTINGS = EngineSettings(max_requests=4, max_pass_tokens=12)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("gemma3-hybrid"))


@pytest.fixture
def passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and the keys that they see, for every pass of the target from now on."""
    forward, seen = target.forward, []

    def watched(packed: Any, *args: Any, **options: Any) -> Any:
        segments = packed.view(None).segments()
        seen.append((packed.num_tokens, sum(len(one.key_slots_K) for one in segments)))
        return forward(packed, *args, **options)

    monkeypatch.setattr(target, "forward", watched)
    return seen


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_a_target_pass_of_so_many_tokens(
    target: Target, passes: list[tuple[int, int]], num_tokens: int
) -> None:
    assert _PassTimer(target, tiny_head(target)).target_s(num_tokens) > 0
    assert passes == [(num_tokens, num_tokens)]


def test_tokens_are_different_ones(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one would go to the same experts, and look cheaper than drafts are."""
    forward, seen = target.forward, []

    def watched(packed: Any, *args: Any, **options: Any) -> Any:
        seen.append(packed.token_ids_T)
        return forward(packed, *args, **options)

    monkeypatch.setattr(target, "forward", watched)
    _PassTimer(target, tiny_head(target)).target_s(64)
    assert len(seen[0].unique()) >= 60


def test_a_context_is_seen_but_not_read(target: Target, passes: list[tuple[int, int]]) -> None:
    """Thousands of cached tokens are there for one pass; filling them in must not take long."""
    assert _PassTimer(target, tiny_head(target)).context_s(2000) > 0
    assert passes[-1] == (16, 2000 + 16)
    assert sum(rows for rows, _ in passes) <= 32


@pytest.mark.parametrize("window", [None, 4])
def test_a_head_pass_of_so_many_tokens(target: Target, window: int | None) -> None:
    head = tiny_head(target, sliding_window=window)
    rows = []
    head.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[0]))
    timer = _PassTimer(target, head)
    assert timer.head_s(9) > 0
    assert rows == [9]


def test_times_are_measured_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    measured: list[int] = []

    def target_s(self: object, num_tokens: int) -> float:
        measured.append(num_tokens)
        return 0.001 * num_tokens

    monkeypatch.setattr(_PassTimer, "target_s", target_s)
    monkeypatch.setattr(_PassTimer, "head_s", lambda self, num_tokens: 0.0001)
    monkeypatch.setattr(_PassTimer, "context_s", lambda self, num_context: 1.0)
    head = tiny_head(target)
    times = measure_pass_times(target, head, SETTINGS, name="tiny")
    assert max(measured) == 12, "no larger than the largest pass"
    assert times.target_s(12) == pytest.approx(0.012)
    assert times.head_s(3) == pytest.approx(0.0001)
    assert times.context_s == 0
    measured.clear()
    again = measure_pass_times(target, head, SETTINGS, name="tiny")
    assert measured == []
    assert again.to_json() == times.to_json()
    measure_pass_times(target, head, SETTINGS, name="another target")
    assert measured
    measured.clear()
    measure_pass_times(target, tiny_head(target, draft_vocab_size=32), SETTINGS, name="tiny")
    assert measured, "another head takes another time"


def test_passes_are_timed_up_to_a_size(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    asked = []
    monkeypatch.setattr(
        timing, "load_or_measure", lambda key, folder, **options: asked.append(options)
    )
    for max_pass_tokens in (64, 10**6):
        settings = EngineSettings(max_pass_tokens=max_pass_tokens)
        measure_pass_times(target, tiny_head(target), settings, name="tiny")
    assert [options["max_tokens"] for options in asked] == [64, 512]


def test_a_loaded_engine_with_a_head_knows_its_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the files of a target and a head to a controller that says why it does what it does."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "_MOST_TOKENS", {"cpu": 16})
    directory = save_tiny_target(tmp_path / "target")
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    save_head(tiny_head(target), tmp_path / "head")
    tree = TreeSettings(depth=2, width=2, budget=3)
    engine = Engine.load(
        str(directory), tmp_path / "head", EngineSettings(tree=tree), device="cpu", dtype="float32"
    )
    assert engine.stats.controller["controller"] == "adaptive"
    engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True))
    assert "reason" in engine.stats.controller
    assert len(list((tmp_path / "cache" / "pass_times").iterdir())) == 1
    fixed = EngineSettings(tree=tree, controller="fixed")
    engine = Engine.load(str(directory), tmp_path / "head", fixed, device="cpu", dtype="float32")
    assert engine.stats.controller["controller"] == "fixed"
