"""Suites: the benchmarks as their owners publish them, files of one's own, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError
from fledge.lab.suite_prompts import NumberCheck, ProgramCheck, Prompt
from fledge.lab.suite_rows import last_number, plain_number
from fledge.lab.suites import HUB_SUITES, load_suite


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_the_built_in_suite_has_eight_prompts_for_each_of_six_tasks() -> None:
    suite = load_suite("builtin")
    assert suite.tasks == ("chat", "math", "code", "summarise", "translate", "qa")
    assert [sum(one.task == task for one in suite.prompts) for task in suite.tasks] == [8] * 6
    assert {type(one.check) for one in suite.only(["math", "code"]).prompts} == {
        NumberCheck,
        ProgramCheck,
    }
    assert sum(len(one.turns) == 2 for one in suite.only(["chat"]).prompts) >= 4
    assert load_suite("builtin/math,code").fingerprint == suite.only(["math", "code"]).fingerprint


def test_some_prompts_of_each_task_spread_over_the_file() -> None:
    suite = load_suite("builtin", max_prompts=2)
    ids = [one.id for one in suite.prompts if one.task == "qa"]
    assert (len(suite.prompts), ids) == (12, ["qa-1", "qa-5"])
    with pytest.raises(ConfigError, match="max_prompts is -1"):
        load_suite("builtin", max_prompts=-1)


def test_benchmarks_are_known_by_their_columns(tmp_path: Path) -> None:
    """Rows of our own in the layouts of MT-bench, GSM8K, HumanEval and Spec-Bench."""
    path = write(
        tmp_path / "bench.jsonl",
        {"question_id": 81, "category": "stem", "turns": ["Why?", "Shorter."]},
        {"question_id": 1, "category": "rag", "turns": ["Read this."], "reference": ["x"]},
        {"question": "2 + 2,000?", "answer": "It is 2,002.\n#### 2,002"},
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n    ...\n",
            "entry_point": "f",
            "canonical_solution": "    return x\n",
            "test": "def check(candidate): assert candidate(1) == 1",
        },
    )
    suite = load_suite(path)
    talk, rag, sum_, code = suite.prompts
    assert suite.tasks == ("mt-bench", "rag", "gsm8k", "humaneval")
    assert (talk.id, talk.turns, talk.check) == ("81", ("Why?", "Shorter."), None)
    assert rag.check is None
    assert sum_.check == NumberCheck(number="2002")
    assert isinstance(code.check, ProgramCheck)
    assert code.raw == "def f(x):\n    ...\n"
    assert code.turns[0].endswith("```python\ndef f(x):\n    ...\n```")


def test_rows_of_your_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own_prompts.jsonl",
        {"prompt": "Hello", "system": "Be kind.", "task": "a", "meta": {"from": 7}},
        {"instruction": "Count to 3", "answer": 3},
        {
            "messages": [
                {"role": "system", "content": "Short."},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "somebody else's"},
                {"role": "user", "content": "Two"},
            ]
        },
        {"question": "Who?", "answer": "a name"},
    )
    first, second, third, fourth = load_suite(path).prompts
    assert (first.system, first.task, first.id) == ("Be kind.", "a", "1")
    assert (second.task, second.check) == ("own", NumberCheck(number="3"))
    assert (third.system, third.turns) == ("Short.", ("One", "Two"))
    assert fourth.check is None, "a text cannot be checked"
    (tmp_path / "list.txt").write_text("One prompt\n\nAnother\n")
    assert [one.turns for one in load_suite(str(tmp_path / "list.txt")).prompts] == [
        ("One prompt",),
        ("Another",),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "  "}, "its prompt is empty"),
        ({"turns": []}, "its turns are empty"),
        ({"turns": ["a", ""]}, "its turns is empty"),
        ({"prompt": 5}, "its prompt is a int, not a text"),
        ({"promt": "a"}, r"it has the unknown column 'promt'; did you mean 'prompt'\?"),
        ({"xyz": "a"}, "it has the unknown column 'xyz'; known are answer, canonical_solution"),
        ({"answer": 5}, r"none of its columns is a prompt \(it has answer\); name one turns"),
        ({"prompt": "a", "question": "b"}, "both 'prompt' and 'question' are prompts"),
        ({"prompt": "a", "answer": [1]}, "its answer is a list, neither a number nor a text"),
        ({"prompt": "a", "entry_point": "f"}, "its test is a NoneType, not a text"),
        ({"messages": "a"}, "its messages are not a list of objects"),
        ({"messages": [{"role": "user"}]}, "its user message is a NoneType"),
        ({"messages": [{"role": "judge"}]}, "the role 'judge'; known are system, user"),
        ({"messages": [{"role": "assistant"}]}, "its messages have no user turn"),
        ([1], "it is a list, not an object"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ArtifactError, match=rf"^bad\.jsonl, line 2: .*{words}"):
        load_suite(path)


def test_files_without_rows_and_ids_that_come_twice(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"empty\.jsonl has no rows; it needs one prompt"):
        load_suite(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ArtifactError, match="two rows of task a have the id '1'"):
        load_suite(write(tmp_path / "twice.jsonl", *[{"id": 1, "task": "a", "prompt": "x"}] * 2))


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no suite 'mtbench': .* \(builtin, mt-bench, gsm8k"):
        load_suite("mtbench")
    with pytest.raises(ConfigError, match="suite builtin has no task 'maths'; it has chat, math"):
        load_suite("builtin/maths")
    with pytest.raises(ConfigError, match="empty name"):
        load_suite(" ")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"Or give the file of the suite by its path, or take"):
        load_suite("gsm8k")
    assert set(HUB_SUITES) == {"mt-bench", "gsm8k", "humaneval"}


def test_later_turns_continue_the_answers() -> None:
    prompt = Prompt(id="1", task="t", turns=("One", "Two"), system="S", raw="RAW")
    assert [message["role"] for message in prompt.messages(["yes"])] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert prompt.messages(["yes"])[2]["content"] == "yes"
    assert prompt.continuation() == "S\n\nRAW"
    assert prompt.continuation([" yes"]) == "S\n\nRAW yes\n\nTwo"


def test_numbers_are_compared_as_numbers() -> None:
    assert last_number("First 3, then $1,200.50.") == "1200.5"
    assert last_number("so 42, and no more,") == "42"
    assert last_number("none") is None
    assert [plain_number(text) for text in ("+7", "7.0", "-0", "-3.10")] == ["7", "7", "0", "-3.1"]


def test_the_real_files() -> None:
    default = Path(__file__).parents[4] / "shared" / "data"
    named = os.environ.get("FLEDGE_SHARED_DATA") or os.environ.get("FLEDGE_DATA") or default
    folder = Path(named) / "bench"
    if not folder.is_dir():
        pytest.skip(f"no benchmark files in {folder}; set FLEDGE_DATA to a folder with them")
    counts = {
        name: len(load_suite(str(folder / f"{name}.jsonl")).prompts)
        for name in ("mt_bench", "gsm8k_test", "humaneval", "spec_bench")
    }
    assert counts == {"mt_bench": 80, "gsm8k_test": 1319, "humaneval": 164, "spec_bench": 480}
    spec = load_suite(str(folder / "spec_bench.jsonl"), max_prompts=1)
    assert len(spec.tasks) == len(spec.prompts) == 6
