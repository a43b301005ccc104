"""vLLM's best chain of each batch size stands beside ours.

Catches: the best of one measure taken for another, and a batch size that one side has not measured.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import vllm_table

    module: ModuleType = vllm_table
    return module


def speeds(whole: float, decoding: float) -> dict[str, Any]:
    return {"tokens_per_s": whole, "decode_tokens_per_s": decoding, "seconds": [100 / whole]}


def test_join(tool: ModuleType, tmp_path: Path) -> None:
    theirs = {
        "vllm": "0.0",
        "failed": {},
        "provenance": {},
        "cells": {
            "0": {"1": speeds(100, 100), "8": speeds(700, 750)},
            "3": {"1": speeds(200, 210)},
            "5": {"1": speeds(190, 240)},
        },
    }
    ours = {
        "provenance": {},
        "cells": {"1": {"plain": speeds(110, 120), "adaptive": speeds(250, 300)}},
    }
    paths = [tmp_path / "theirs.json", tmp_path / "ours.json"]
    for path, document in zip(paths, (theirs, ours), strict=True):
        path.write_text(json.dumps(document), encoding="utf-8")
    document = tool.join([f"8B={paths[0]},{paths[1]}"])
    cells = document["subjects"]["8B"]["cells"]
    assert cells["1"]["tokens_per_s"]["vllm_best_chain"] == 3
    assert cells["1"]["decode_tokens_per_s"]["vllm_best_chain"] == 5
    assert cells["1"]["tokens_per_s"]["fledge_over_vllm_best"] == pytest.approx(1.25)
    assert cells["1"]["tokens_per_s"]["plain_over_vllm_plain"] == pytest.approx(1.1)
    assert cells["1"]["tokens_per_s"]["over_own_plain"]["ratio"] == pytest.approx(250 / 110)
    assert "fledge_over_vllm_best" not in cells["8"]["tokens_per_s"]
    assert "| 1 | 100 | 200 (3) | 110 | 250 | 1.10 | 1.25 |" in tool.markdown(document)
