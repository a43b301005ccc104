"""Killed at any moment: no row lost, doubled or torn, and no finished row asked again."""

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.contracts.progress import SilentProgress, Task
from fledge.data.regenerate.journal import JOURNAL_NAME, read_entries
from fledge.store.manifest import read_manifest
from fledge.store.rows import read_rows
from tests.unit.data.flaky_server import ALL_FAULTS, FlakyServer
from tests.unit.data.regenerate_support import (
    ask,
    make_source,
    mixed_rows,
    output_bytes,
    simple_rows,
)
from tests.warm_programs import WarmProgram, WarmPrograms

CONCURRENCY = 8
QUICK_FAULTS = tuple(fault for fault in ALL_FAULTS if fault != "hang")
"""Without the one that costs a second each time."""


def start(warm: WarmPrograms, source: Path, out: Path, url: str) -> WarmProgram:
    return warm.start(
        [sys.executable, "-m", "tests.unit.data.regenerate_process", source, out, url]
    )


def finished_turns(out: Path) -> set[tuple[int, str]]:
    """Answers in the journal, by row and payload."""
    path = out / JOURNAL_NAME
    entries = list(read_entries(path)) if path.exists() else []
    assert None not in entries, "a whole line is damaged"
    return {(one.row, one.text.decode()) for one in entries if one and one.kind != "failed"}


@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_kills(warm: WarmPrograms, tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(8)
    source = make_source(tmp_path / "c", mixed_rows(100))
    with FlakyServer() as server:
        calm = ask(source, tmp_path / "calm", server.url, turns="all")
        num_answers = server.answered.total()
    out = tmp_path / "killed"
    with FlakyServer(faults=QUICK_FAULTS, max_faults=2, service_s=(0.005, 0.04)) as server:
        step = num_answers // (num_kills + 2)
        for number in range(num_kills):
            before = finished_turns(out)
            answered = Counter(server.answered)
            process = start(warm, source, out, server.url)
            wanted = server.answered.total() + chance.randint(1, step)
            while server.answered.total() < wanted and process.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.03)
            assert process.poll() is None, "it ended before it was killed"
            process.kill()
            process.wait()
            while server.in_flight:
                time.sleep(0.001)
            after = finished_turns(out)
            assert before <= after, f"kill {number} lost an answer"
            assert_not_asked_again(server, answered, num_new=len(after - before))
        assert start(warm, source, out, server.url).wait(60) == 0
        # Answers that were on their way when the process died may be asked for once more.
        assert server.answered.total() - num_answers <= num_kills * CONCURRENCY
        assert len(server.answered) == num_answers
    assert read_manifest(out).fingerprint == calm.fingerprint
    assert output_bytes(out) == output_bytes(tmp_path / "calm")
    ids = [row.id for row in read_rows(out)]
    assert ids == [f"chat/{n}" for n in range(1, 101)]


def assert_not_asked_again(server: FlakyServer, before: Counter[str], num_new: int) -> None:
    """Of the whole answers of one run, at most those in flight are not new entries."""
    num_sent = (server.answered - before).total()
    assert num_new <= num_sent <= num_new + CONCURRENCY


class Died(Exception):
    """The end of a process, as far as what it leaves behind is concerned."""


class DyingProgress(SilentProgress):
    """Dies when so many rows have been written."""

    def __init__(self, num_rows: int) -> None:
        self._num_left = num_rows

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        if label == "writing":
            yield self
        else:
            with super().task(label, total, unit) as silent:
                yield silent

    def advance(self, amount: int) -> None:
        self._num_left -= amount
        if self._num_left < 0:
            raise Died

    def update_total(self, total: int) -> None:
        raise AssertionError(total)


def test_the_end_of_a_process_while_it_writes(tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", mixed_rows(50))
    out = tmp_path / "out"
    with FlakyServer() as server:
        calm = ask(source, tmp_path / "calm", server.url)
        for num_rows in (0, 1, 25, 49):
            with pytest.raises(Died):
                ask(source, out, server.url, progress=DyingProgress(num_rows))
        manifest = ask(source, out, server.url)
        assert set(server.answered.values()) == {2}
    assert manifest.fingerprint == calm.fingerprint
    assert output_bytes(out) == output_bytes(tmp_path / "calm")


def test_a_damaged_answer_is_asked_again(tmp_path: Path) -> None:
    notes: list[str] = []

    class Listening(SilentProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    source, out = make_source(tmp_path / "c", simple_rows(20)), tmp_path / "out"
    with FlakyServer() as server:
        with pytest.raises(Died):
            ask(source, out, server.url, progress=DyingProgress(0))
        content = bytearray((out / JOURNAL_NAME).read_bytes())
        content[len(content) // 2] ^= 1
        (out / JOURNAL_NAME).write_bytes(content)
        manifest = ask(source, out, server.url, progress=Listening())
        assert sorted(server.answered.values()) == [1] * 19 + [2]
        calm = ask(source, tmp_path / "calm", server.url)
    assert notes == [
        "damaged lines in answers.journal: 1; their rows are asked again.",
        "19 of 20 rows were answered before.",
    ]
    assert manifest.fingerprint == calm.fingerprint


def test_a_finished_directory_is_left_alone(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "c", simple_rows(5)), tmp_path / "out"
    with FlakyServer() as server:
        first = ask(source, out, server.url)
        (out / JOURNAL_NAME).write_bytes(b"left by a kill just after the manifest")
        stamp = (out / "rows-00000.jsonl").stat().st_mtime_ns
        assert ask(source, out, server.url, concurrency=2, retries=1) == first
        assert server.asked.total() == 5
    assert (out / "rows-00000.jsonl").stat().st_mtime_ns == stamp
    assert not (out / JOURNAL_NAME).exists()


def test_other_work_is_refused(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "c", simple_rows(5)), tmp_path / "out"
    with FlakyServer(models=("tiny", "big")) as server:
        ask(source, out, server.url)
        with pytest.raises(MismatchError, match="identity.model = 'tiny', and this run has"):
            ask(source, out, server.url, model="big")
        with pytest.raises(MismatchError, match=r"settings.max_tokens = 1024, and this run has"):
            ask(source, out, server.url, max_tokens=5)
        other = make_source(tmp_path / "c2", simple_rows(6))
        with pytest.raises(MismatchError, match=r"parents.conversations = '\w+', and this run"):
            ask(other, out, server.url)


def test_one_writer(warm: WarmPrograms, tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "c", simple_rows(5)), tmp_path / "out"
    with FlakyServer(service_s=(0.3, 0.3)) as server:
        process = start(warm, source, out, server.url)
        while not server.asked:
            time.sleep(0.01)
        with pytest.raises(ArtifactError, match="another fledge process is writing"):
            ask(source, out, server.url, turns="all")
        assert process.wait(60) == 0
