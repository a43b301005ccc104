"""Rows in files: whole or not at all, in order, any text."""

from pathlib import Path

import pytest

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.errors import ArtifactError
from fledge.store.rows import read_rows, row_files, rows_file, write_rows


def row(number: int, text: str = "Hi") -> Conversation:
    return Conversation(
        id=f"a:{number}",
        messages=({"role": "user", "content": text},),
        origin=Origin(source="a", licence="MIT", file="a.jsonl", row=number),
    )


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (100_000, 2, 99_999):
        assert write_rows(rows_file(tmp_path, number), [row(number), row(number + 1)]) == 2
    assert [path.name for path in row_files(tmp_path)] == [
        "rows-00002.jsonl",
        "rows-99999.jsonl",
        "rows-100000.jsonl",
    ]
    numbers = [one.origin.row for one in read_rows(tmp_path)]
    assert numbers == [2, 3, 99_999, 100_000, 100_000, 100_001]


@pytest.mark.parametrize(
    "text", ["Grüße, 東京, 🦅", "line\nbreak\r\nand\u2028other", "\x00", "half a pair: \ud83d!"]
)
def test_any_text_survives(tmp_path: Path, text: str) -> None:
    write_rows(rows_file(tmp_path, 0), [row(1, text), row(2)])
    assert [one.messages[0]["content"] for one in read_rows(tmp_path)] == [text, "Hi"]
    assert rows_file(tmp_path, 0).read_bytes().count(b"\n") == 2
    rows_file(tmp_path, 0).read_text(encoding="utf-8")


def test_a_run_that_dies_leaves_no_file(tmp_path: Path) -> None:
    def rows():
        yield row(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(rows_file(tmp_path, 0), rows())
    assert row_files(tmp_path) == []


@pytest.mark.parametrize("damage", [b'{"id": ', b"\xff\xfe\n", b"[1]\n", b"\n", b'{"id": "a"}\n'])
def test_damage_is_named_by_file_and_line(tmp_path: Path, damage: bytes) -> None:
    write_rows(rows_file(tmp_path, 0), [row(1)])
    with rows_file(tmp_path, 0).open("ab") as file:
        file.write(damage)
    with pytest.raises(ArtifactError, match=r"rows-00000\.jsonl, line 2 is damaged"):
        list(read_rows(tmp_path))
