"""Figures of the README are those of the files it names, to the letter.

Catches: a number changed by hand, a file measured anew whose figures were not taken over.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.lab.test_shipping import bench, scorecard

ROOT = Path(__file__).parents[3]
ENTRY = {
    "prompt": "Name two rivers.",
    "text": "The Rhine and the Po.",
    "outputs_identical": True,
    "baseline_tokens_per_s": 20.0,
    "speculative_tokens_per_s": 35.0,
    "speedup": 1.75,
    "accept_length": 2.5,
}
DEMO: dict[str, Any] = {
    **ENTRY,
    "target": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "device_name": "cpu",
    "threads": 2,
    "num_prompts": 2,
    "prompts": [{**ENTRY, "prompt": "What is rain?"}, ENTRY],
}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import readme_figures

    module: ModuleType = readme_figures
    return module


def test_the_readme_is_as_the_files_have_it(tool: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tool.render(text) == text, "run: python tools/readme_figures.py --write"


def test_blocks_are_made_from_files(tool: ModuleType, tmp_path: Path) -> None:
    card = {**scorecard("x"), "best": "run", "target": "tiny"}
    served = {**bench(), "arms": [{"name": "plain"}, {"name": "head", "target": "tiny"}]}
    for name, document in (("demo", DEMO), ("card", card), ("bench", served)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    page = (
        "before\n<!-- demo demo.json -->\nold\n<!-- end -->\nbetween\n"
        "<!-- table demo.json card.json bench.json -->\nold\n<!-- end -->\n"
        "<!-- demo -->\nkept\n<!-- end -->\n"
    )
    made = tool.render(page, tmp_path)
    assert tool.render(made, tmp_path) == made
    assert "old" not in made
    assert "kept" in made
    for words in (
        "2. Name two rivers.",
        "1.75 times as fast, 2.50 tokens a pass",
        "20.0 tokens/s without the head, 35.0 with it: **1.75x**, identical texts",
        "tiny, greedy, chains of 7, bfloat16, NVIDIA H200",
        "accept length gsm8k 3.25; **1.75x** plain decoding [1.50, 2.00]",
        "at 32 users: 1.06 ([file](benchmarks/bench.json))",
    ):
        assert words in made
    assert "What is rain?" not in made
