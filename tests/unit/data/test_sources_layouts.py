"""Lines, arrays, parquet; compressed or not; in any Unicode; in bounded memory."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.data.sources.byte_chunks import as_text
from fledge.data.sources.id_ledger import IdLedger
from fledge.data.sources.json_values import read_values
from fledge.data.sources.layouts import choose_layout, row_limit_bytes
from fledge.data.sources.line_rows import read_lines
from tests.unit.data.reading import Told, as_lines, prompts, read, reader, texts

ROWS = prompts(3)
SAID = ["prompt 0", "prompt 1", "prompt 2"]
COMPRESSIONS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# What a file is


@pytest.mark.parametrize(
    ("text", "row_numbers"),
    [
        (as_lines(*ROWS), [1, 2, 3]),
        (as_lines(*ROWS).replace("\n", "\r\n\r\n").rstrip(), [1, 3, 5]),
        (json.dumps(ROWS), [1, 2, 3]),
        (json.dumps(ROWS, indent=1), [1, 2, 3]),
        ("[" + ",\n".join(map(json.dumps, ROWS)) + "]", [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows", "rows.jsonl"])
def test_layouts_are_seen_by_content(tmp_path, text, row_numbers, name):
    rows = read(write(tmp_path / name, text))
    assert texts(rows) == SAID
    assert [row.origin.row for row in rows] == row_numbers
    assert [row.id for row in rows] == ["src/1", "src/2", "src/3"]


def test_values_one_after_the_other(tmp_path):
    text = "\n  " + "\n".join(json.dumps(row, indent=2) for row in ROWS)
    rows = read(write(tmp_path / "rows.json", text))
    assert texts(rows) == SAID
    assert [row.origin.row for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("a.txt", b'{"prompt": "x"}\n', "lines"),
        ("a.txt.gz", b"{braces}\nb", "text"),
        ("a.json", b'[{"a": 1}]', "values"),
        ("a.json", b'[["a"]]\n\n', "values"),
        ("a.json", b'["a"]\n["b"]\n', "lines"),
        ("a.json", b'{"a": 1}', "lines"),
        ("a.json", b'{\n "a": {"b": 1}\n}', "values"),
        ("a.json", b'{broken\n{"a": 1}\n', "lines"),
        ("a.json", b"garbage\n" + b'{"a": 1}\n', "lines"),
        ("a.json", b'{"a": "' + b"x" * (1 << 18), "values"),
        ("a.jsonl", b"garbage\n", "lines"),
        ("a.json", b'"a"\n"b"\n', "lines"),
        ("a.jsonl", b'[\n{"a": 1}\n]', "values"),
    ],
)
def test_choice_of_layout(name, head, expected):
    assert choose_layout(name, head, is_prompt_list=False) == expected


def test_the_schema_is_noted_once_where_there_are_many_files(tmp_path):
    for number in range(25):
        write(tmp_path / f"{number:02}.jsonl", as_lines(*prompts(1, number)))
    write(tmp_path / "zz.txt", "text\n")
    told = Told()
    assert len(read(tmp_path, told=told)) == 26
    assert told.notes == ["00.jsonl: prompts from field `prompt`", "zz.txt: each row is a prompt"]


# Compression and encodings


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("name", ["rows.jsonl.{}", "rows.json", "misnamed.gz.bz2"])
def test_compressed_files_whatever_their_name(tmp_path, kind, name):
    data = COMPRESSIONS[kind](as_lines(*ROWS).encode())
    path = write(tmp_path / name.format(kind), data)
    source = reader(path)
    assert texts(source) == SAID
    assert source.report.bytes_read == len(data)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_several_compressed_parts_and_padding(tmp_path, kind):
    parts = [COMPRESSIONS[kind](as_lines(row).encode()) for row in ROWS]
    assert texts(read(write(tmp_path / "rows", b"".join(parts) + b"\0" * 512))) == SAID


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_parts_are_found_at_any_border_of_chunks(kind):
    text = as_lines(*prompts(40)).encode()
    data = COMPRESSIONS[kind](text[:100]) + COMPRESSIONS[kind](text[100:])
    for size in (1, 7, 64, 1000):
        assert b"".join(as_text(pieces(data, size), "x")) == text


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("is_array", [False, True])
def test_truncated_files_give_what_they_have(tmp_path, kind, is_array):
    rows = [{"prompt": f"{i} {i * 7919 % 100_003}"} for i in range(4000)]
    text = json.dumps(rows) if is_array else as_lines(*rows)
    data = b"".join(COMPRESSIONS[kind](part) for part in pieces(text.encode(), 10_000))
    path = write(tmp_path / "rows", data[: len(data) * 2 // 3])
    told = Told()
    source = reader(path, told=told)
    found = list(source)
    assert 1000 < len(found) < 4000
    assert found[-1].messages[0]["content"] == rows[len(found) - 1]["prompt"]
    ((_, number, reason),) = source.report.bad
    assert number == len(found) + 1
    assert reason.startswith("the file is cut off here: its ")
    assert told.notes[1].endswith("has no end. The rest of the file is left out.")
    with pytest.raises(ArtifactError, match=r"rows, (line|row) \d+: the file is cut off here"):
        read(path, on_bad_row="stop")


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_damaged_compressed_files(tmp_path, kind):
    data = bytearray(COMPRESSIONS[kind](as_lines(*prompts(4000)).encode()))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    source = reader(write(tmp_path / "rows", bytes(data)))
    with suppress(ArtifactError):  # when the damage reaches back to the first row
        list(source)
    assert source.report.bad_by_reason["damaged file"] == 1


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be"]
)
def test_byte_order_marks(tmp_path, encoding):
    mark = "" if encoding in ("utf-8-sig", "utf-16", "utf-32") else "\ufeff"
    text = mark + as_lines({"prompt": "żółć 🦅"}, *ROWS)
    data = text.encode(encoding)
    assert texts(read(write(tmp_path / "rows.jsonl", data))) == ["żółć 🦅", *SAID]
    assert texts(read(write(tmp_path / "z.jsonl", gzip.compress(data))))[0] == "żółć 🦅"


def test_text_that_begins_like_bzip2(tmp_path):
    assert texts(read(write(tmp_path / "a.txt", "BZh9 is a prompt\n"))) == ["BZh9 is a prompt"]


def test_encodings_that_are_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", as_lines(*ROWS).encode("utf-16-le"))
    with pytest.raises(
        ArtifactError, match=r"rows.jsonl is not text: it is full of null bytes\. If it is UTF-16"
    ):
        read(path)
    torn = as_lines(*ROWS).encode("utf-16")[:-1]
    source = reader(write(tmp_path / "torn.jsonl", torn))
    assert texts(source) == SAID[:2]
    assert source.report.bad[0].reason == (
        "the file is damaged here: utf-16-le text with truncated data"
    )


def test_bytes_that_are_no_utf8_inside_an_array(tmp_path):
    data = json.dumps([*ROWS, {"prompt": "caf?"}]).encode().replace(b"?", b"\xe9")
    source = reader(write(tmp_path / "rows.json", data))
    assert texts(source) == SAID
    assert source.report.bad == [
        ("rows.json", 4, "message 1: the turn contains half of a surrogate pair, or is not UTF-8")
    ]


# JSON arrays, piece by piece

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(JSON, max_size=6), st.integers(1, 40), st.sampled_from([None, 2]), st.booleans())
def test_arrays_are_split_as_json_loads_would(rows, size, indent, is_ascii):
    data = json.dumps(rows, indent=indent, ensure_ascii=is_ascii).encode()
    found = list(read_values(pieces(data, size), max_row_bytes=10_000))
    assert [row.value for row in found] == rows
    assert all(row.problem is None for row in found)


@settings(max_examples=50, deadline=None)
@given(st.lists(JSON, min_size=1, max_size=6), st.integers(1, 40), st.data())
def test_wrong_elements_leave_the_others_readable(rows, size, data):
    place = data.draw(st.integers(0, len(rows)))
    wrong = data.draw(st.sampled_from(["tru", "{'a': [1]}", '{"a" 1, "]": "\\"}"}', "-", '"\t"']))
    texts = [json.dumps(row) for row in rows]
    texts.insert(place, wrong)
    found = list(read_values(pieces(f"[{', '.join(texts)}]".encode(), size), max_row_bytes=10_000))
    assert [row.value for row in found if row.problem is None] == rows
    assert [row.number for row in found if row.problem is not None] == [place + 1]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "number", "reason"),
    [
        ("[1, 2", 3, "not JSON: the array has no end"),
        ("[1, 2,", 3, "not JSON: the array has no end"),
        ('[1, 2, {"a": 1', 3, "not JSON: Expecting ',' delimiter at column 8"),
        ("[1, 2 3]", 3, "not JSON: no comma before this row; the rest is left out"),
        ("[1, 2] 3", 3, "not JSON: there is text behind the end of the array"),
        ("[1, 2, NaN]", 3, "not JSON: NaN is no JSON number"),
        ('[1, 2, "\0"]', 3, "it contains a null byte"),
        ("[1, 2, " + "[" * 50_000 + "]" * 50_000 + "]", 3, "its JSON is nested too deeply"),
        ("[1, 2, {\n'a'}]", 3, "not JSON: Expecting property name enclosed in double quotes at it"),
        ("1 2 }", 3, "not JSON: Expecting value at column 1"),
        ("[1, 2, " + '"' + "\\" * 30_000 + '"]', 3, "the row is longer than 20,000 bytes"),
        ("[1, 2, {" + '"x": "' + "[" * 30_000, 3, "the row is longer than 20,000 bytes"),
    ],
)
def test_broken_arrays(text, number, reason, size):
    limit = 20_000 if "longer" in reason else 1 << 20
    step = max(size, len(text) // 500)
    found = list(read_values(pieces(text.encode(), step), max_row_bytes=limit))
    assert [row.value for row in found[:2]] == [1, 2]
    (bad,) = [row for row in found if row.problem is not None]
    assert bad.number == number
    assert bad.problem is not None
    assert bad.problem.detail.startswith(reason)


def test_rows_behind_a_row_that_is_too_long_are_read():
    long = json.dumps({"a": ['\\"]}' * 9, {"b": "x" * 5000}]})
    text = f'["first", {long}, "last"]'.encode()
    for size in (1, 10, 999):
        found = list(read_values(pieces(text, size), max_row_bytes=2000))
        assert [row.value for row in found] == ["first", None, "last"]


@given(st.lists(st.text("ab \r", max_size=12), max_size=8), st.integers(1, 20), st.integers(1, 12))
def test_lines_are_split_at_any_border_of_chunks(lines, size, limit):
    data = "\n".join(lines).encode()
    found = list(read_lines(pieces(data, size), is_json=False, max_row_bytes=limit))
    expected: list[tuple[int, Any]] = []
    for number, line in enumerate(lines, start=1):
        if len(line) > limit:
            expected.append((number, None))
        elif line.strip():
            expected.append((number, line.strip()))
    assert [(row.number, row.value) for row in found] == expected


# Parquet


def test_parquet_in_every_schema(tmp_path):
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    ]
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    other = {"name": "g", "parameters": {"type": "object", "properties": {"b": {"type": "number"}}}}
    rows = [
        {"messages": messages, "tools": [tool], "blob": b"\xff", "id": "x"},
        {"messages": messages[:1], "tools": [other], "blob": None, "id": "y"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    first, second = read(tmp_path / "chat.parquet")
    assert first.messages[2] == {
        "role": "tool",
        "content": "r",
        "tool_call_id": "c1",
        "name": "f",
    }
    assert second.messages == ({"role": "user", "content": "q"},)
    assert second.tools == ({"type": "function", "function": other},)
    assert (first.origin.row_id, second.origin.row) == ("x", 2)

    share = [{"conversations": [{"from": "human", "value": "h"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(share), tmp_path / "share")
    assert texts(read(tmp_path / "share")) == ["h"]


def test_parquet_is_read_by_groups_and_wanted_columns(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": [f"p{i}" for i in range(1000)], "unused": [b"x"] * 1000})
    parquet.write_table(table, path, row_group_size=300)
    told = Told()
    source = reader(path, told=told)
    assert texts(source) == [f"p{i}" for i in range(1000)]
    assert source.report.bytes_read == path.stat().st_size == told.done["reading src"]
    parquet.write_table(table.rename_columns(["alpha", "beta"]), path)
    with pytest.raises(ConfigError, match="rows have the fields alpha, beta"):
        read(path)


def test_damaged_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": [f"{i} {'x' * 90}" for i in range(5000)]})
    parquet.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    with pytest.raises(ArtifactError, match=r"rows.parquet begins like a parquet file and is none"):
        read(write(path, whole[: len(whole) // 2]))
    with pytest.raises(ArtifactError, match=r"rows.parquet is a compressed parquet file; decompr"):
        read(write(path, gzip.compress(whole)))
    middle = len(whole) // 2
    source = reader(write(path, whole[:middle] + b"\xff" * 9000 + whole[middle + 9000 :]))
    assert 2000 < len(list(source)) < 5000
    assert set(source.report.bad_by_reason) <= {"damaged file", "not UTF-8"}


def test_parquet_texts_that_are_no_utf8(tmp_path):
    texts_ = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": texts_}), tmp_path / "rows.parquet")
    source = reader(tmp_path / "rows.parquet")
    assert texts(source) == ["a", "c"]
    assert source.report.bad == [("rows.parquet", 2, "not UTF-8: invalid start byte")]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"rows.parquet is a parquet file, .* pip install 'fledge\[data\]'"
    ):
        read(tmp_path / "rows.parquet")


# Memory and going on

_PROBE = """
import sys
from pathlib import Path
from pyarrow import parquet
from tests.unit.data.reading import reader

def peak_kb():
    # Unlike getrusage, this does not count what the parent had before the program started.
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])

before = peak_kb()
source = reader(sys.argv[1])
count = sum(1 for _ in source)
print(count, source.report.rows_bad, (peak_kb() - before) // 1000)
"""
_MAX_GROWTH_MB = 40


def write_large(path: Path, layout: str) -> int:
    """About 60 MB; returns how many rows."""
    filler = "many words that say nothing " * 80
    num_rows = 24_000
    rows = (json.dumps({"id": i, "prompt": f"{i} {filler}"}) for i in range(num_rows))
    if layout == "parquet":
        schema = pyarrow.schema([("prompt", pyarrow.string())])
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as out:
            for start in range(0, num_rows, 2000):
                texts_ = [f"{i} {filler}" for i in range(start, start + 2000)]
                out.write_table(pyarrow.table({"prompt": texts_}))
        return num_rows
    with gzip.open(path, "wt", 1) if layout == "gzip" else path.open("w") as file:
        if layout == "array":
            file.write("[" + ",".join(rows) + "]")
        else:
            file.writelines(row + "\n" for row in rows)
        if layout == "long line":
            for _ in range(60):
                file.write("x" * 1_000_000)
    return num_rows


@pytest.mark.parametrize(
    "layout",
    [
        "lines",
        "long line",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("array", "gzip", "parquet")),
    ],
)
def test_memory_stays_bounded(tmp_path, layout):
    num_rows = write_large(tmp_path / "large", layout)
    process = subprocess.run(
        [sys.executable, "-c", _PROBE, str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert process.returncode == 0, process.stderr
    count, num_bad, growth_mb = map(int, process.stdout.split())
    assert (count, num_bad) == (num_rows, int(layout == "long line"))
    assert growth_mb < _MAX_GROWTH_MB, growth_mb


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_few_bytes_that_stand_for_many(kind):
    data = COMPRESSIONS[kind](bytes(45_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match="x is not text: it is full of null bytes"):
            as_text(pieces(data, 1 << 20), "x")
        assert tracemalloc.get_traced_memory()[1] < 36_000_000
    finally:
        tracemalloc.stop()


def test_rows_have_a_limit_that_holds_every_allowed_turn():
    assert row_limit_bytes(200_000) == 16 << 20
    assert row_limit_bytes(10_000_000) == 80_000_000


def test_skipped_rows_are_counted_and_the_report_is_the_same(tmp_path):
    tasks = {"id": "t", "instruction": "Do.", "instances": [{"input": "x"}, {"input": "y"}]}
    lines = as_lines(tasks, {"id": "t", "instruction": 5}, tasks, tasks)
    path = write(tmp_path / "rows.jsonl", lines)
    whole = reader(path)
    rows = list(whole)
    assert [row.id for row in rows] == [f"src/{i}" for i in (1, 2, 4, 5, 6, 7)]
    for skip in range(9):
        resumed = reader(path, skip_rows=skip)
        assert list(resumed) == [row for row in rows if int(row.id.split("/")[1]) > skip]
        assert resumed.report.to_json() == whole.report.to_json()


def test_reading_goes_on_after_a_pause_and_may_end_early(tmp_path):
    told = Told()
    source = reader(write(tmp_path / "rows.jsonl", as_lines(*prompts(50))), told=told)
    assert next(iter(source)).id == "src/1"
    assert (source.report.rows_read, source.report.duplicate_ids) == (1, 0)
    assert next(iter(source)).id == "src/2"
    source.close()
    assert list(source) == []
    assert source.report.rows_read == 2


def test_ids_are_counted_beyond_what_is_kept_in_memory():
    ledger = IdLedger(buffer_ids=100)
    for i in range(1000):
        ledger.add(f"id {i % 700}")
    assert ledger.count_repeats() == 300
    ledger.add("id 0")
    assert ledger.count_repeats() == 301
