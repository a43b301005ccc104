"""The real files: schema seen, every row read, tools and languages kept."""

import json
from pathlib import Path

import pytest

from fledge.contracts.conversation import Conversation
from tests.unit.data.reading import Told, read, reader

TRAIN = {
    "gsm8k_train.jsonl": (7473, 0, "prompts from field `question`"),
    "mbpp.jsonl": (974, 0, "prompts from field `text`"),
    "seed_tasks.jsonl": (175, 0, "tasks from fields `instruction` and `instances`"),
    "user_oriented_instructions.jsonl": (252, 0, "tasks from fields `instruction`"),
    "glaive_toolcall_en_demo.json": (300, 0, "ShareGPT turns from field `conversations`"),
    # Two of its rows have the result of a call that nobody made.
    "glaive_toolcall_zh_demo.json": (300, 2, "ShareGPT turns from field `conversations`"),
    "BFCL_v4_live_simple.json": (258, 0, "function-calling questions from fields `question`"),
    "BFCL_v4_multiple.json": (200, 0, "function-calling questions from fields `question`"),
    "BFCL_v4_parallel.json": (200, 0, "function-calling questions from fields `question`"),
    "BFCL_v4_simple_python.json": (400, 0, "function-calling questions from fields `question`"),
}
BENCH = {
    "gsm8k_test.jsonl": (1319, "question"),
    "humaneval.jsonl": (164, "prompt"),
    "mt_bench.jsonl": (80, "turns"),
    "spec_bench.jsonl": (480, "turns"),
}


@pytest.mark.parametrize("name", TRAIN)
def test_files_of_prompts(train_data: Path, name: str) -> None:
    num_rows, num_bad, sentence = TRAIN[name]
    told = Told()
    source = reader(train_data / name, told=told)
    rows = list(source)
    assert told.notes[0].startswith(f"{name}: {sentence}")
    assert (source.report.rows_read, source.report.rows_bad) == (num_rows, num_bad)
    assert len(rows) == num_rows - num_bad
    assert source.report.bytes_read == (train_data / name).stat().st_size
    assert source.report.duplicate_ids == 0
    assert all(Conversation.from_json(json.loads(json.dumps(r.to_json()))) == r for r in rows[:50])


@pytest.mark.parametrize("name", BENCH)
def test_files_of_benchmarks(bench_data: Path, name: str) -> None:
    num_rows, field = BENCH[name]
    told = Told()
    rows = read(bench_data / name, told=told)
    assert told.notes == [f"{name}: prompts from field `{field}`"]
    assert len(rows) == num_rows


def test_the_whole_directory(train_data: Path) -> None:
    source = reader(train_data)
    ids = [row.id for row in source]
    assert len(set(ids)) == len(ids) == sum(rows - bad for rows, bad, _ in TRAIN.values())
    assert set(source.report.schemas) == set(TRAIN)
    assert source.report.rows_bad == 2


def test_tool_calls_of_real_rows(train_data: Path) -> None:
    rows = read(train_data / "glaive_toolcall_zh_demo.json")
    calls = [call for row in rows for m in row.messages for call in m.get("tool_calls", ())]
    results = [m for row in rows for m in row.messages if m["role"] == "tool"]
    assert len(calls) == len(results) == 216
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    assert all(result["name"] and result["tool_call_id"] for result in results)
    assert any("发票" in m["content"] for m in rows[0].messages if m["content"])
    tools = [tool for row in rows for tool in row.tools]
    assert tools
    assert all(tool["type"] == "function" for tool in tools)


def test_types_of_bfcl_are_those_of_json_schema(train_data: Path) -> None:
    rows = read(*(train_data / name for name in TRAIN if name.startswith("BFCL")))
    assert len(rows) == 1058
    text = json.dumps([row.tools for row in rows])
    assert all(row.tools for row in rows)
    assert '"type": "object"' in text
    for name in ("dict", "float", "tuple", "any"):
        assert f'"type": "{name}"' not in text
