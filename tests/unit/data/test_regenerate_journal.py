"""The journal: whole lines only, whatever happened to the file."""

import errno
import os
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, CapacityError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.input_rows import InputRows
from fledge.data.regenerate.dialogue import Reply
from fledge.data.regenerate.journal import NOWHERE, Journal, read_entries
from fledge.data.regenerate.worklist import Worklist
from fledge.store.manifest import read_manifest
from tests.unit.data.regenerate_support import make_source, mixed_rows, say


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.journal"


def open_rows(source: Path) -> InputRows:
    return InputRows(source, read_manifest(source), SilentProgress())


def fill(path: Path) -> list[int]:
    with Journal(path) as journal:
        first = journal.append("turn", 5, NOWHERE, {"text": "Größe\n\ud800 鷹"})
        second = journal.append("end", 5, first, {"text": ""})
        return [first, second, journal.append("end", 2, NOWHERE, [1, 2])]


def test_entries_come_back(path: Path) -> None:
    offsets = fill(path)
    with Journal(path) as journal:
        assert [one.offset for one in journal.entries() if one] == offsets
        entry = journal.read(offsets[1])
        assert (entry.kind, entry.row, entry.before) == ("end", 5, offsets[0])
        assert journal.read(offsets[0]).payload == {"text": "Größe\n\ud800 鷹"}


def test_every_torn_end_is_cut(path: Path, tmp_path: Path) -> None:
    """A killed process leaves the file at any length."""
    offsets = fill(path)
    content = path.read_bytes()
    ends = [*offsets[1:], len(content)]
    torn = tmp_path / "torn.journal"
    for length in range(len(content) + 1):
        torn.write_bytes(content[:length])
        num_whole = sum(end <= length for end in ends)
        assert len([one for one in read_entries(torn) if one]) == num_whole
        with Journal(torn) as journal:
            added = journal.append("end", 9, NOWHERE, "more")
            assert journal.read(added).payload == "more"
        found = [one.row for one in read_entries(torn) if one is not None]
        assert found == [5, 5, 2][:num_whole] + [9]


def test_every_damaged_byte_costs_one_entry_at_most(path: Path) -> None:
    fill(path)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        found = [one.text for one in read_entries(path) if one is not None]
        assert len(found) >= (1 if damaged[position] == 10 or content[position] == 10 else 2)
        assert all(text in content for text in found)


def test_a_damaged_turn_takes_the_later_ones_of_its_row_along(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", mixed_rows(3))
    settings = RegenerateSettings(turns="all")
    path = tmp_path / "answers.journal"
    with open_rows(source) as rows, Journal(path) as journal:
        worklist = Worklist(rows, journal, settings, "m")
        for dialogue in worklist.pending():
            while not dialogue.is_over:
                answer = Reply(message=say("assistant", "new"), finish_reason="stop")
                worklist.record(dialogue, answer)
        assert worklist.num_done == 3
        third = [one for one in journal.entries() if one and one.row == 2]
        assert [one.kind for one in third] == ["turn", "end"]
    content = bytearray(path.read_bytes())
    content[third[0].offset + 20] ^= 1
    path.write_bytes(content)
    with open_rows(source) as rows, Journal(path) as journal:
        worklist = Worklist(rows, journal, settings, "m")
        assert worklist.num_damaged == 1
        (dialogue,) = worklist.pending()
        assert dialogue.row == 2
        assert dialogue.question is not None
        assert dialogue.question.turn == 0


def test_a_file_that_changes_below_us(path: Path) -> None:
    offsets = fill(path)
    with Journal(path) as journal:
        content = bytearray(path.read_bytes())
        content[offsets[2] + 15] ^= 1
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=f"changed at byte {offsets[2]} while it was used"):
            journal.read(offsets[2])


def test_a_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half a line and then no more."""
    fill(path)
    before = path.read_bytes()
    real = os.pwrite

    def full(handle: int, data: bytes, offset: int) -> int:
        if len(data) < 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[: len(data) // 2], offset)

    with Journal(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(CapacityError, match="goes on where it stopped"):
                journal.append("end", 1, NOWHERE, "x" * 200)
        assert path.read_bytes() == before
        journal.append("end", 1, NOWHERE, "fits now")
    assert len([one for one in read_entries(path) if one]) == 4


def test_a_disk_that_does_not_take_the_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.data.regenerate.journal.COMMIT_EVERY_S", 0.001)
    real = os.fsync
    journal = Journal(path)

    def broken(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", broken)
    journal.append("end", 1, NOWHERE, "x")
    journal._committer.join(10)
    with pytest.raises(CapacityError, match="the disk is full"):
        journal.append("end", 2, NOWHERE, "x")
    monkeypatch.setattr(os, "fsync", real)
    journal.close()
