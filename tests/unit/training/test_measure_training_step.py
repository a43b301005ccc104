"""The measurement of a training step runs on a CPU too, with a tiny head."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "measure_training_step.py"


def test_a_tiny_head_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, TOOL.stem, tool)
    spec.loader.exec_module(tool)
    out = tmp_path / "steps.json"
    words = ["--cases", "tiny,tiny-whole-steps", "--device", "cpu", "--repeats", "1"]
    words += ["--out", str(out)]
    monkeypatch.setattr(sys, "argv", [TOOL.name, *words])
    tool.main()
    document = json.loads(out.read_text())
    fast, twin, launched, captured = document["results"]
    assert fast["tokens_per_s"] > 0
    # The same weights after the same three steps.
    assert fast["loss"] == pytest.approx(twin["loss"], abs=1e-3)
    assert captured["loss"] == pytest.approx(launched["loss"], abs=1e-3)
    assert document["fast_over_twin"][0]["name"] == "tiny"
    assert tool.CASES["8b"][0].shape.flops_per_token(7) == pytest.approx(16.2e9, rel=0.01)
