"""How engines of vLLM are driven for a comparison, without vLLM.

Catches: a chain left out that could have won, a cache too small for its batch, an engine that dies
or hangs and takes the run with it, and processes left behind.
"""

import os
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import vllm_engines

    module: ModuleType = vllm_engines
    return module


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import vllm_subjects

    module: ModuleType = vllm_subjects
    return module


@pytest.mark.parametrize(
    ("chain", "speeds", "loser"),
    [
        (5, {}, None),
        (1, {0: 200.0, 5: 460.0, 3: 400.0}, 3),
        (4, {0: 200.0, 5: 460.0, 3: 400.0}, None),
        (2, {0: 170.0, 3: 180.0, 1: 200.0}, None),
        (5, {0: 170.0, 3: 180.0, 1: 200.0}, 3),
        (2, {0: 120.0, 1: 110.0}, 1),
        (2, {0: 120.0, 1: 119.0}, None),
    ],
)
def test_only_chains_beyond_one_that_lost_are_left_out(
    engines: ModuleType, chain: int, speeds: dict[int, float], loser: int | None
) -> None:
    assert engines.cannot_win(chain, speeds) == loser


def test_the_cache_is_that_of_the_largest_batch(subjects: ModuleType, tmp_path: Path) -> None:
    subject = subjects.read_subject("small=tiny:0,3", tmp_path, 512)
    given = subjects.engine_options(subject, 3, [1, 8], rate=0.5, answer_len=256, is_cpu=False)
    bytes_of_a_token = 2 * 2 * (8 + 1) * 2 * 32  # keys and values, 16 bits, layers, heads, size
    assert given["kv_cache_memory_bytes"] == 8 * (128 + 256 + 64) * bytes_of_a_token
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32]
    assert given["speculative_config"]["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125]
    with pytest.raises(SystemExit, match="has no head"):
        subjects.read_subject(f"mine={tmp_path / 'small' / 'target'}:0,3", tmp_path, 512)


class _FakeEngine:
    def __init__(self, **options: Any) -> None:
        if options.get("fails"):
            raise ValueError("no memory left")
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda timeout: None)
        )


def _measure(_: Any, size: int) -> dict[str, Any]:
    if size == 99:
        os._exit(3)
    if size == 98:
        time.sleep(60)
    return {"tokens_per_s": float(size)}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_engines_that_fail_die_or_hang_are_told_apart(
    engines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = ModuleType("vllm")
    fake.LLM = _FakeEngine
    monkeypatch.setitem(__import__("sys").modules, "vllm", fake)

    def start(name: str, **options: Any) -> Any:
        return engines.EngineProcess(name, options, _measure, tmp_path / f"{name}.log")

    good, bad, dying, slow = start("a"), start("b", fails=True), start("c"), start("d")
    assert good.wait(60) >= 0
    with pytest.raises(RuntimeError, match="ValueError: no memory left"):
        bad.wait(60)
    assert good.measure(8, 60) == {"tokens_per_s": 8.0}
    dying.wait(60)
    with pytest.raises(RuntimeError, match="its process ended"):
        dying.measure(99, 60)
    slow.wait(60)
    with pytest.raises(RuntimeError, match="nothing came within 0 s"):
        slow.measure(98, 0.1)
    good.ask_to_end()
    for engine in (good, bad, dying, slow):
        engine.end(timeout_s=1.0)
        assert engine._process.exitcode is not None


def test_a_gate_opens_when_its_file_is_there(engines: ModuleType, tmp_path: Path) -> None:
    assert engines.wait_for(None, 60) == 0.0
    (tmp_path / "go").touch()
    assert engines.wait_for(tmp_path / "go", 60) < 60
    assert engines.wait_for(tmp_path / "never", 0.0) < 60
