"""Suites by name, from a small server that speaks the hub's protocol."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from fledge.lab.suite_prompts import NumberCheck, ProgramCheck
from fledge.lab.suites import load_suite
from tests.unit.data.test_sources_hub import Hub


class SuiteHub(Hub):
    """Rows of our own in the columns that these data sets have there."""

    sets: dict[str, dict[str, bytes]] = {}


def table(path: Path, *rows: dict[str, Any]) -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path.read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    talk = {"prompt": ["One?", "Two?"], "prompt_id": 81, "category": "stem", "reference": [""]}
    stub = {"task_id": "HumanEval/0", "prompt": "def f(): ...\n", "canonical_solution": ""}
    SuiteHub.sets = {
        "openai/gsm8k": {
            "main/test-00000-of-00001.parquet": table(
                tmp_path / "a", {"question": "6 times 7?", "answer": "It is 42.\n#### 42"}
            ),
            "main/train-00000-of-00001.parquet": b"",
        },
        "HuggingFaceH4/mt_bench_prompts": {
            "data/train-00000-of-00001.parquet": table(tmp_path / "b", talk),
            "raw/question.jsonl": b"",
        },
        "openai/openai_humaneval": {
            "openai_humaneval/test-00000-of-00001.parquet": table(
                tmp_path / "c", {**stub, "test": "def check(f): ...", "entry_point": "f"}
            )
        },
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), SuiteHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("hub")
def test_known_names_are_found_on_the_hub() -> None:
    talk, sums, code = (load_suite(name) for name in ("mt-bench", "gsm8k", "humaneval"))
    assert [(one.name, one.tasks) for one in (talk, sums, code)] == [
        ("mt-bench", ("mt-bench",)),
        ("gsm8k", ("gsm8k",)),
        ("humaneval", ("humaneval",)),
    ]
    assert talk.prompts[0].turns == ("One?", "Two?")
    assert sums.prompts[0].check == NumberCheck(number="42")
    assert isinstance(code.prompts[0].check, ProgramCheck)
    assert sums.source == "hf://openai/gsm8k/main/test-00000-of-00001.parquet"
    assert load_suite("hf://openai/gsm8k/main/test-00000-of-00001.parquet").prompts == sums.prompts
