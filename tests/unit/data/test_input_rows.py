"""Rows by number: read in any order, and refused when they are not what was written."""

from dataclasses import replace
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import SilentProgress
from fledge.data.input_rows import InputRows
from fledge.store.manifest import Manifest, Plan, read_manifest
from fledge.store.rows import rows_file
from fledge.store.stage_directory import open_stage
from tests.unit.data.regenerate_support import make_source, simple_rows


def test_rows_by_number(tmp_path: Path) -> None:
    rows = simple_rows(70)
    source = make_source(tmp_path / "c", rows)
    with open_stage(source, Plan(kind="conversations", settings={})) as stage:
        manifest = stage.manifest
    with InputRows(source, manifest, SilentProgress()) as found:
        assert len(found) == 70
        assert [found[number] for number in (69, 0, 40, 41, 0)] == [
            rows[number] for number in (69, 0, 40, 41, 0)
        ]


def test_some_sources_come_more_often(tmp_path: Path) -> None:
    rows = simple_rows(6)
    for number in (1, 4):
        origin = replace(rows[number].origin, source="mäth")
        rows[number] = replace(rows[number], id=f"mäth/{number}", origin=origin)
    manifest = read_manifest(make_source(tmp_path / "c", rows, rows_per_file=2))
    often = {"mäth": 3, "absent": 2}
    with InputRows(tmp_path / "c", manifest, SilentProgress(), source_copies=often) as found:
        ids = [found[number].id for number in range(len(found))]
    assert ids[:6] == [row.id for row in rows]
    assert ids[6:] == ["mäth/1~2", "mäth/4~2", "mäth/1~3", "mäth/4~3"]
    chats = [row.id for row in rows if row.id.startswith("chat")]
    with InputRows(
        tmp_path / "c", manifest, SilentProgress(), copies=2, source_copies={"mäth": 1}
    ) as found:
        assert [found[number].id for number in range(6, len(found))] == [f"{c}~2" for c in chats]


def finish(directory: Path, content: bytes) -> Manifest:
    with open_stage(directory, Plan(kind="conversations", settings={})) as stage:
        path = rows_file(directory, 0)
        path.write_bytes(content)
        return stage.finish(counts={}, files=[path])


@pytest.mark.parametrize("line", [b"{]", b"[]", b"{}", b"\xff"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: bytes) -> None:
    manifest = finish(tmp_path, b"{}\n{}\n" + line + b"\n")
    with (
        InputRows(tmp_path, manifest, SilentProgress()) as found,
        pytest.raises(ArtifactError, match=r"rows-00000.jsonl, line 3 is damaged"),
    ):
        found[2]
