"""Bad input: named with file and line, skipped or fatal by option, never a traceback."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.report import MAX_BAD_SHOWN
from fledge.data.sources.tool_calls import dump_json
from tests.unit.data.reading import Told, as_lines, prompts, read, reader, texts, write_lines

GOOD = '{"prompt": "good"}'
DEEP = "[" * 100_000 + "]" * 100_000


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


USER = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}


def bad_line(tmp_path: Path, line: str | bytes, **options: Any) -> tuple[str, str]:
    """Kind and reason of the one bad line between two good ones."""
    path = tmp_path / "rows.jsonl"
    body = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
    path.write_bytes(GOOD.encode() + b"\n" + body + b"\n" + GOOD.encode() + b"\n")
    source = reader(path, **options)
    assert texts(source) == ["good", "good"]
    ((file, number, reason),) = source.report.bad
    assert (file, number) == ("rows.jsonl", 2)
    assert (source.report.rows_read, source.report.rows_bad) == (3, 1)
    with pytest.raises(ArtifactError) as stopped:
        read(path, on_bad_row="stop", **options)
    assert str(stopped.value) == (
        f'rows.jsonl, line 2: {reason}. Repair it, or set prepare.on_bad_row = "skip" to leave '
        "bad rows out."
    )
    (kind,) = source.report.bad_by_reason
    return kind, reason


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        ('{"prompt": "a"', "not JSON", "not JSON: Expecting ',' delimiter at column 15"),
        ("not json", "not JSON", "not JSON: Expecting value at column 1"),
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON", "not JSON: Extra data at column 17"),
        ('{"prompt": "a", "x": NaN}', "not JSON", "not JSON: NaN is no JSON number"),
        ('{"prompt": -Infinity}', "not JSON", "not JSON: -Infinity is no JSON number"),
        ('{"x": ' + "9" * 5000 + "}", "not JSON", r"not JSON: Exceeds the limit .*"),
        ('{"prompt": "a\x00b"}', "null byte", "it contains a null byte"),
        (r'{"prompt": "a\u0000b"}', "null byte", "message 1: the turn contains a null character"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8", "not UTF-8: invalid continuation byte at byte 16"),
        (r'{"prompt": "\ud83d"}', "not UTF-8", "message 1: the turn contains half of a surr.*"),
        (DEEP, "nested too deeply", "its JSON is nested too deeply"),
        ('{"prompt": ' + DEEP + "}", "nested too deeply", "its JSON is nested too deeply"),
        ('{"prompt": 5}', "schema", "field `prompt` has no text in it"),
        ('{"prompt": []}', "schema", "field `prompt` has no text in it"),
        ("17", "schema", "field `prompt` has no text in it"),
        ('{"prompt": " \\n"}', "empty user message", "message 1: the user says nothing"),
    ],
)
def test_bad_lines(tmp_path, line, kind, reason):
    found_kind, found_reason = bad_line(tmp_path, line)
    assert found_kind == kind
    if ".*" in reason:
        assert found_reason.startswith(reason.removesuffix(".*"))
    else:
        assert found_reason == reason


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (chat(), "no messages", "its list of messages is empty or no list"),
        ({"messages": {"a": 1}}, "no messages", "its list of messages is empty or no list"),
        ({"messages": None}, "schema", "it has no field `messages`"),
        ({"messages": "[1"}, "not JSON", "not JSON: Expecting ',' delimiter at column 3"),
        ([1], "no messages", "message 1 is no object"),
        ("text", "schema", "the row is a str, not an object with fields"),
        (chat({"role": "assistant", "content": "a"}), "no user message", "it has no user message"),
        (chat({"role": "user", "content": None}), "empty user message", "message 1: the user"),
        (chat(USER, {"role": "assistant"}), "empty assistant message", "message 2: the assistant"),
        (
            chat({"role": "martian"}),
            "unknown role",
            "message 1: the role 'martian' is not known; k",
        ),
        (chat({"content": "x"}), "unknown role", "message 1: the role None is not known"),
        (chat({"role": "user", "content": {"a": 1}}), "content", "message 1: its content is dict"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}),
            "content",
            "message 1: its content has a part of type 'image_url'; only text is read",
        ),
        (
            chat(USER, {"role": "tool", "content": "r"}),
            "tool result without a call",
            "message 2: a tool result has no unanswered call before it",
        ),
        (
            chat(USER, CALLS, {"role": "tool", "content": "r", "tool_call_id": "c2"}),
            "tool result without a call",
            "message 3: a tool result for 'c2' has no such call before it",
        ),
        (
            chat(
                USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 90}}]}
            ),
            "tool call",
            "message 2: a tool call has no name: {'function': {'arguments': 'xxx",
        ),
        (
            chat(USER, {"role": "assistant", "tool_calls": "f()"}),
            "tool call",
            "message 2: its tool_calls are no list",
        ),
        (
            chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}),
            "tool call",
            "message 2: the arguments of f: not JSON: Expecting property name",
        ),
        (
            chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}),
            "tool call",
            "message 2: the arguments of f are no object: '[1]'",
        ),
        (
            chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}),
            "tool call",
            "message 2: the arguments of f are no object: [1]",
        ),
        (chat(USER, tools="[{"), "tool call", "tools: not JSON: Expecting property name"),
        (chat(USER, tools=[{"name": 1}]), "tool definition", "a tool definition has no name: {'na"),
        (
            chat(USER, tools=[{"name": "f", "parameters": {"default": "\ud800"}}]),
            "not UTF-8",
            "the text of its tools contains half of a surrogate pair",
        ),
    ],
)
def test_bad_conversations(tmp_path, row, kind, reason):
    path = write_lines(tmp_path / "rows.jsonl", chat(USER))
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    source = reader(path)
    assert len(list(source)) == 1
    assert source.report.bad_by_reason == {kind: 1}
    assert source.report.bad[0].reason.startswith(reason)


def test_bad_rows_of_other_schemas(tmp_path):
    rows = [
        ({"instruction": "a", "output": "b"}, {"instruction": 1, "output": "b"}),
        ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": 5}),
        ({"instruction": "a", "history": []}, {"instruction": "a", "history": [["x"]]}),
        ({"instruction": "a", "instances": []}, {"instruction": "a", "instances": [1]}),
        ({"question": [[USER]]}, {"question": "flat"}),
    ]
    for number, (good, bad) in enumerate(rows):
        source = reader(write_lines(tmp_path / f"{number}.jsonl", good, bad))
        assert len(list(source)) == 1
        assert source.report.bad_by_reason == {"schema": 1}


def test_numbers_too_large_for_json_stay_out(tmp_path):
    lines = as_lines(chat(USER))
    overflow = json.dumps(chat(USER, tools=[{"name": "f", "parameters": {"x": 12345}}]))
    (tmp_path / "rows.jsonl").write_text(lines + overflow.replace("12345", "1e999") + "\n")
    source = reader(tmp_path / "rows.jsonl")
    assert len(list(source)) == 1
    assert source.report.bad[0].reason.startswith("its tools cannot be written as JSON: Out of ran")


def test_deep_values_inside_texts_are_bad_rows(tmp_path):
    deep_tools = {"prompt": "a", "messages": [USER], "tools": DEEP}
    source = reader(write_lines(tmp_path / "rows.jsonl", chat(USER), deep_tools))
    assert len(list(source)) == 1
    assert source.report.bad[0].reason == "tools: its JSON is nested too deeply"


def test_no_depth_of_nesting_escapes(tmp_path):
    """Some depths can be read and not be worked on."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for depth in range(0, 1200, 25):
            nested = '{"a":' * depth + "1" + "}" * depth
            function = f'{{"name": "f", "parameters": {nested}}}'
            file.write(f'{{"question": [[{json.dumps(USER)}]], "function": [{function}]}}\n')
    source = reader(path)
    assert len(list(source)) > 1
    assert set(source.report.bad_by_reason) == {"nested too deeply"}
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RowProblem, match="the things are nested too deeply"):
        dump_json(value, "the things")


def test_a_turn_of_a_million_characters(tmp_path):
    text = "é\\n\\u00e9x" * 250_000  # a million characters, written in several ways
    start = time.perf_counter()
    kind, reason = bad_line(tmp_path, f'{{"prompt": "{text}"}}')
    assert time.perf_counter() - start < 2
    assert kind == "turn too long"
    assert reason == "message 1: the turn has 1,000,000 characters, and max_turn_chars is 200,000"
    assert texts(read(tmp_path / "rows.jsonl", max_turn_chars=1_000_000))[1] == "é\néx" * 250_000


def test_long_reasoning_calls_and_tools_count_as_turns(tmp_path):
    long = "x" * 50
    rows = [
        chat(USER, {"role": "assistant", "content": "a", "reasoning_content": long}),
        chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": long}}]}),
        chat(USER, tools=[{"name": long}]),
    ]
    source = reader(write_lines(tmp_path / "rows.jsonl", chat(USER), *rows), max_turn_chars=40)
    assert len(list(source)) == 1
    assert source.report.bad_by_reason == {"turn too long": 3}


def test_messages_about_rows_stay_short(tmp_path):
    rows = [chat(USER), chat({"role": "x" * 10_000}), chat(USER, {"role": "tool"} | {"n": 1})]
    source = reader(write_lines(tmp_path / "rows.jsonl", *rows))
    list(source)
    assert all(len(row.reason) < 320 for row in source.report.bad)
    with pytest.raises(ConfigError) as refused:
        read(write_lines(tmp_path / "odd.jsonl", {"k" * 10_000: 1}))
    assert len(str(refused.value)) < 1500


def test_ids_count_every_row_and_repeated_ids_are_counted(tmp_path):
    rows = [{"id": "a", "prompt": "1"}, {"id": "b"}, {"id": "a", "prompt": "3"}, {"prompt": "4"}]
    source = reader(write_lines(tmp_path / "rows.jsonl", *rows))
    assert [(row.id, row.origin.row_id) for row in source] == [
        ("src/1", "a"),
        ("src/3", "a"),
        ("src/4", None),
    ]
    assert source.report.duplicate_ids == 1


def test_report_names_the_first_bad_rows_and_counts_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"bad {i}\n" if i % 2 else f"{GOOD}\n" for i in range(100)))
    told = Told()
    source = reader(path, told=told)
    assert len(list(source)) == 50
    assert len(source.report.bad) == MAX_BAD_SHOWN
    assert source.report.bad_by_reason == {"not JSON": 50}
    assert told.notes[-1] == "src: 50 of 100 rows left out (not JSON: 50)"
    document = source.report.to_json()
    assert document["bad"][0] == {
        "file": "rows.jsonl",
        "line": 2,
        "reason": "not JSON: Expecting value at column 1",
    }
    assert document["rows_bad"] == 50
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize("content", [b"", b"\n\n  \r\n", b"\xef\xbb\xbf", b"[]", b"[ ]\n"])
def test_a_source_without_rows(tmp_path, content):
    (tmp_path / "empty.json").write_bytes(content)
    with pytest.raises(
        ArtifactError, match=r"^source src has no rows: nothing is in empty.json\.$"
    ):
        read(tmp_path / "empty.json")
    write_lines(tmp_path / "full.json", *prompts(2))
    assert len(read(tmp_path)) == 2


def test_many_empty_files_are_not_all_named(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.jsonl").touch()
    with pytest.raises(ArtifactError, match=r"nothing is in 0.jsonl, 1.jsonl, 2.jsonl and 2 more"):
        read(tmp_path)


def test_a_source_of_bad_rows_only(tmp_path):
    (tmp_path / "rows.jsonl").write_text("nope\n" * 3000)
    with pytest.raises(
        ArtifactError,
        match=r"all 3,000 rows of source src are bad; the first is number 1 of rows.jsonl: not JSO",
    ):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_that_is_neither_json_nor_a_list_of_prompts(tmp_path, suffix):
    path = tmp_path / f"readme.md{suffix}"
    text = b"# Title\n\nSome prose.\n"
    path.write_bytes(gzip.compress(text) if suffix else text)
    with pytest.raises(
        ArtifactError,
        match=r"readme.md\S* is neither JSON, JSON lines nor parquet; it begins with '# Title.*"
        r'ends in \.txt, or `format = "prompts"`',
    ):
        read(path)


def test_missing_places(tmp_path):
    write_lines(tmp_path / "rows.jsonl", *prompts(1))
    with pytest.raises(
        ArtifactError, match=r"there is no file or directory .*rows.json\. Did you "
    ):
        read(tmp_path / "rows.json")
    with pytest.raises(
        ArtifactError, match=r"or directory .*/no/where/a.json\. There is no direct"
    ):
        read(tmp_path / "no" / "where" / "a.json")
    with pytest.raises(ArtifactError, match=r"no file matches .*\*\.parquet"):
        read(tmp_path / "*.parquet")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.md").write_text("x")
    with pytest.raises(ArtifactError, match=r"the directory .*other has no data files \(names th"):
        read(tmp_path / "other")
    with pytest.raises(ArtifactError, match=r"/dev/null is neither a file nor a directory"):
        read("/dev/null")
    with pytest.raises(
        ConfigError, match=r"'ftp://host/x' cannot be read; known are local paths a"
    ):
        read("ftp://host/x")


def test_a_file_that_the_system_will_not_read():
    with pytest.raises(ArtifactError, match=r"mem cannot be read: \[Errno \d+\] Input/output"):
        read("/proc/self/mem")


def test_a_file_that_vanishes(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", *prompts(1))
    source = reader(path)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"rows.jsonl cannot be read: No such file or dir"):
        list(source)
