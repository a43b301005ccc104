"""Interrupted, killed, repeated: the same rows always become the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.contracts.progress import SilentProgress, Task
from fledge.data.tokenize_stage import TokenizeJob, estimate_job, prepare_job, tokenize
from fledge.store.manifest import Manifest
from fledge.store.stage_directory import open_stage
from tests.unit.data.tokenize_support import (
    REFUSED,
    SMALL,
    UNCLEAR,
    many_rows,
    run,
    write_source,
)


class Interrupted(Exception):
    pass


class FallingProgress(SilentProgress):
    """Fails when the work under `label` has advanced so many times."""

    def __init__(self, label: str, after: int) -> None:
        self._label = label
        self._left = after

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        with super().task(label, total, unit) as silent:
            yield self if label == self._label else silent

    def advance(self, amount: int) -> None:
        del amount
        self._left -= 1
        if self._left < 0:
            raise Interrupted

    def update_total(self, total: int) -> None:
        del total


@pytest.fixture(scope="module")
def large_job(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TokenizeJob, Manifest]:
    """A job of many shards, and what an unbroken run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    rows = [*many_rows(400), REFUSED, UNCLEAR, *many_rows(200)]
    source = write_source(folder / "in", rows)
    settings = replace(SMALL, on_unclear="skip", shard_tokens=2000)
    job = prepare_job(source, str(target), settings)
    return job, tokenize(job, folder / "unbroken")


def test_the_same_rows_give_the_same_bytes(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path
) -> None:
    job, unbroken = large_job
    again = tokenize(job, tmp_path / "again")
    assert again.files == unbroken.files
    assert again.fingerprint == unbroken.fingerprint
    assert len(again.files) > 10


@pytest.mark.parametrize(
    ("label", "after"), [("tokenizing", 0), ("tokenizing", 2), ("counting tokens", 3)]
)
def test_an_interrupted_run_goes_on(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path, label: str, after: int
) -> None:
    job, unbroken = large_job
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        tokenize(job, out, FallingProgress(label, after))
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    (out / f".shard-{len(written):05d}.safetensors.tmp").write_bytes(b"half a shard")
    (out / ".shard-99999.safetensors.tmp").write_bytes(b"half a shard")
    assert tokenize(job, out).fingerprint == unbroken.fingerprint
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    assert written.items() <= kept.items()
    assert not list(out.glob(".shard*"))
    finished = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    tokenize(job, out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == finished


def test_other_processes_change_nothing(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path
) -> None:
    job, unbroken = large_job
    with pytest.raises(Interrupted):
        tokenize(job, tmp_path / "out", FallingProgress("tokenizing", 1), num_workers=2)
    assert list((tmp_path / "out").glob("shard-*"))
    made = tokenize(job, tmp_path / "out")
    assert made.files == unbroken.files
    assert made.fingerprint == unbroken.fingerprint


@pytest.mark.slow
def test_other_processes_go_on_and_refuse_the_same(
    large_job: tuple[TokenizeJob, Manifest], tmp_path: Path
) -> None:
    job, unbroken = large_job
    with pytest.raises(Interrupted):
        tokenize(job, tmp_path / "out", FallingProgress("tokenizing", 1))
    made = tokenize(job, tmp_path / "out", num_workers=2)
    assert made.fingerprint == unbroken.fingerprint
    strict = replace(job, settings=replace(job.settings, on_unclear="stop"))
    with pytest.raises(MismatchError, match=r"row chat/7 .* cannot be tokenized"):
        tokenize(strict, tmp_path / "strict", num_workers=2)


@pytest.mark.slow
def test_killed_at_any_moment(
    large_job: tuple[TokenizeJob, Manifest], target: Path, tmp_path: Path
) -> None:
    """A real process and a real kill -9, somewhere in the middle."""
    job, unbroken = large_job
    out = tmp_path / "out"
    assignments = [
        f"--set=tokenize.{k}={v}"
        for k, v in job.plan.settings.items()
        if k in ("max_tokens", "draft_vocab_size", "shard_tokens", "on_unclear")
    ]
    command = [sys.executable, "-m", "fledge", "tokenize", str(job.source), "--out", str(out)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [*command, "--target", str(target), *assignments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    wanted = random.Random(time.time_ns()).randint(1, len(unbroken.files) - 2)
    while len(list(out.glob("shard-*"))) < wanted and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tokenize(job, out).fingerprint == unbroken.fingerprint


def test_two_writers_are_refused(source: Path, target: Path, tmp_path: Path) -> None:
    job = prepare_job(source, str(target), SMALL)
    with (
        open_stage(tmp_path / "out", job.plan),
        pytest.raises(ArtifactError, match="another fledge process is writing"),
    ):
        tokenize(job, tmp_path / "out")


def test_other_settings_need_another_directory(source: Path, target: Path, tmp_path: Path) -> None:
    run(source, target, tmp_path / "out")
    with pytest.raises(
        MismatchError, match=r"settings.max_tokens = 200, and this run has .* = 100"
    ):
        run(source, target, tmp_path / "out", replace(SMALL, max_tokens=100))


def test_the_estimate_is_near(large_job: tuple[TokenizeJob, Manifest], tmp_path: Path) -> None:
    job, unbroken = large_job
    estimate = estimate_job(job, SilentProgress())
    assert estimate.rows == 602
    assert estimate.tokens == pytest.approx(unbroken.counts["tokens"], rel=0.05)
    stored = sum(entry["bytes"] for entry in unbroken.files.values())
    assert 0.5 * stored < estimate.stored_bytes < 2 * stored
