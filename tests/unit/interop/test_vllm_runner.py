"""vLLM's runner with a vLLM that only counts: one engine at a time, kept where it serves again."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import TreeSettings
from fledge.interop.engines import vllm_runner
from fledge.interop.engines.job import EngineRun


class CountedLLM:
    alive: ClassVar[int] = 0
    started: ClassVar[list[Any]] = []

    def __init__(self, **options: Any) -> None:
        assert CountedLLM.alive == 0, "the one before is gone when the next one starts"
        CountedLLM.alive += 1
        CountedLLM.started.append(options.get("speculative_config"))

    def __del__(self) -> None:
        CountedLLM.alive -= 1

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        answer = SimpleNamespace(token_ids=[7], finish_reason="length")
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        return []


def test_engines_follow_each_other_and_never_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = ModuleType("vllm")
    fake.LLM, fake.SamplingParams, fake.__version__ = CountedLLM, SimpleNamespace, "0"
    monkeypatch.setitem(sys.modules, "vllm", fake)
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    runs = [run_of(tmp_path, head) for head in ("one", "one", "two", None)]
    job.write_text(json.dumps({"runs": [run.as_json() for run in runs], "turn": None}))
    monkeypatch.setattr(sys, "argv", ["vllm_runner.py", str(job), str(result)])
    vllm_runner.main()
    heads = [
        None if config is None else Path(config["model"]).name for config in CountedLLM.started
    ]
    assert heads == ["one", "two", None]
    answers = [run["answers"] for run in json.loads(result.read_text())["runs"]]
    assert answers == [[{"token_ids": [7], "finish_reason": "length"}] * 2] * 4


def run_of(folder: Path, head: str | None) -> EngineRun:
    return EngineRun(
        target=folder,
        head=folder / head if head else None,
        tree=TreeSettings(depth=3, width=1, budget=3),
        prompts=((1,), (2,)),
        params=SamplingParams(max_tokens=1),
        eos_token_ids=(),
        dtype="float32",
        max_model_len=64,
    )
