"""Whatever ends a run, the next one goes on, and the bytes are those of an unbroken run."""

import json
import resource
import sys
from pathlib import Path

import pytest

from fledge.contracts.errors import CapacityError
from fledge.contracts.progress import SilentProgress
from fledge.data.filtering import FilterPass
from fledge.data.prepare import prepare
from fledge.store.manifest import read_manifest
from tests.unit.data.kill_prepare import ROWS_PER_SAVE, run
from tests.unit.data.prepare_support import contents, write_sources
from tests.warm_programs import WarmPrograms


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("unbroken")
    run(base, base / "out")
    return base / "out"


def kill(warm: WarmPrograms, base: Path, *how: object) -> dict[str, int]:
    program = [sys.executable, "-m", "tests.unit.data.kill_prepare", base, base / "out", *how]
    done = warm.run(program, text=True)
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report


def assert_same(out: Path, unbroken: Path) -> None:
    assert contents(out) == contents(unbroken)
    assert read_manifest(out).fingerprint == read_manifest(unbroken).fingerprint


@pytest.mark.parametrize("num_kills", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random(
    warm: WarmPrograms, tmp_path: Path, unbroken: Path, num_kills: int
) -> None:
    report = kill(warm, tmp_path, "random", 11, num_kills)
    assert report["killed"] == num_kills
    assert report["resumed"] >= 1
    assert_same(tmp_path / "out", unbroken)


def test_killed_at_one_flush_after_the_other(
    warm: WarmPrograms, tmp_path: Path, unbroken: Path
) -> None:
    report = kill(warm, tmp_path, "flushes")
    assert report["killed"] >= 5
    assert report["resumed"] >= 3
    assert_same(tmp_path / "out", unbroken)


def test_interrupted_between_the_passes(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FilterPass.run

    def stop_after(self: FilterPass) -> list[object]:
        whole(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FilterPass, "run", stop_after)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, tmp_path / "out")
    (tmp_path / "out" / ".rows-00000.jsonl.tmp").write_text("half a ro")
    (tmp_path / "out" / "rows-00003.jsonl").write_text("nothing that belongs here")
    run(tmp_path, tmp_path / "out")
    assert_same(tmp_path / "out", unbroken)


def test_a_full_disk_is_an_error_in_words_and_loses_nothing(tmp_path: Path, unbroken: Path) -> None:
    settings = write_sources(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (5_000, 60_000, 130_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(CapacityError, match=r"(?i)free some space and run"):
                prepare(
                    settings,
                    tmp_path / "out",
                    target="tiny",
                    self_prompts=None,
                    progress=SilentProgress(),
                    base=tmp_path,
                    rows_per_save=ROWS_PER_SAVE,
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run(tmp_path, tmp_path / "out")
    assert_same(tmp_path / "out", unbroken)
