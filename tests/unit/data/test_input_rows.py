"""Rows by number: read in any order, and refused when they are not what was written."""

from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import SilentProgress
from fledge.data.input_rows import InputRows
from fledge.store.manifest import Manifest, Plan
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
