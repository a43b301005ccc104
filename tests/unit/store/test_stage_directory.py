"""One writer per directory, resumable work, and refusal of what belongs to other work."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.store.manifest import Plan, read_manifest
from fledge.store.stage_directory import PLAN_NAME, first_difference, open_stage

PLAN = Plan(kind="conversations", settings={"rows": 3, "sources": [{"name": "a"}]})


def plan(**changes: Any) -> Plan:
    return Plan(kind="conversations", settings={**PLAN.settings, **changes})


def finish(out: Path) -> None:
    with open_stage(out, PLAN) as stage:
        (out / "rows-00000.jsonl").write_text("{}\n")
        stage.finish(counts={"rows": 1}, files=[out / "rows-00000.jsonl"])


def test_a_stage_is_finished_once(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with open_stage(out, PLAN) as stage:
        assert not stage.is_finished
        (out / "rows-00000.jsonl").write_text("{}\n")
        made = stage.finish(counts={"rows": 1}, files=[out / "rows-00000.jsonl"])
    assert made.files["rows-00000.jsonl"]["bytes"] == 3
    with open_stage(out, PLAN) as stage:
        assert stage.is_finished
        assert stage.manifest.fingerprint == made.fingerprint
    assert read_manifest(out).counts == {"rows": 1}


def test_unfinished_work_is_reopened(tmp_path: Path) -> None:
    with open_stage(tmp_path, PLAN):
        (tmp_path / "part").write_text("half")
    with open_stage(tmp_path, PLAN) as stage:
        assert not stage.is_finished
        assert (tmp_path / "part").read_text() == "half"


def test_a_plan_half_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".{PLAN_NAME}.tmp").write_text("{")
    with open_stage(tmp_path, PLAN) as stage:
        assert not stage.is_finished


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    with open_stage(tmp_path, PLAN):
        with pytest.raises(ArtifactError, match="another fledge process is writing"):
            open_stage(tmp_path, PLAN).__enter__()
        code = (
            "from pathlib import Path; import sys\n"
            "from fledge.store.manifest import Plan\n"
            "from fledge.store.stage_directory import open_stage\n"
            "open_stage(Path(sys.argv[1]), Plan(kind='x', settings={})).__enter__()\n"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
        )
        assert "another fledge process is writing" in other.stderr
    with open_stage(tmp_path, PLAN):
        pass


def test_other_work_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    with open_stage(tmp_path, PLAN):
        pass
    with pytest.raises(
        MismatchError,
        match=r"holds unfinished work with settings.rows = 3, and this run has settings.rows = 4; "
        "choose another directory, or remove this one",
    ):
        open_stage(tmp_path, plan(rows=4)).__enter__()
    finish(tmp_path)
    with pytest.raises(MismatchError, match=r"finished work with settings.sources\[0\]\.name"):
        open_stage(tmp_path, plan(sources=[{"name": "b"}])).__enter__()


def test_without_results_there_is_nothing_to_protect(tmp_path: Path) -> None:
    with open_stage(tmp_path, PLAN):
        pass
    with open_stage(tmp_path, plan(rows=4), has_results=lambda path: False):
        pass
    with pytest.raises(MismatchError, match=r"settings.rows = 4, and this run has"):
        open_stage(tmp_path, PLAN, has_results=lambda path: True).__enter__()
    answers = Plan(kind="answers", settings={})
    with pytest.raises(MismatchError, match=r"kind = 'conversations', and this run has kind = 'a"):
        open_stage(tmp_path, answers, has_results=lambda path: False).__enter__()


def test_a_run_that_stopped_at_a_bad_row_may_skip_it(tmp_path: Path) -> None:
    with open_stage(tmp_path, plan(on_bad_row="stop")):
        pass
    with open_stage(tmp_path, plan(on_bad_row="skip")) as stage:
        (tmp_path / "part").write_text("half")
    with pytest.raises(MismatchError, match=r"settings.on_bad_row = 'skip', and this run has"):
        open_stage(tmp_path, plan(on_bad_row="stop")).__enter__()
    with open_stage(tmp_path, plan(on_bad_row="skip")) as stage:
        made = stage.finish(counts={}, files=[])
    assert made.plan.settings["on_bad_row"] == "skip"


def test_a_finished_directory_that_lost_a_file(tmp_path: Path) -> None:
    finish(tmp_path)
    (tmp_path / "rows-00000.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"rows-00000.jsonl is missing"):
        open_stage(tmp_path, PLAN).__enter__()


def test_long_differences_are_cut(tmp_path: Path) -> None:
    with open_stage(tmp_path, PLAN):
        pass
    with pytest.raises(MismatchError) as caught:
        open_stage(tmp_path, plan(sources=[{"name": "b" * 50}] * 50)).__enter__()
    assert len(str(caught.value)) < 500


def test_a_strangers_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"not made by fledge \(it holds thesis.tex\)"):
        open_stage(tmp_path, PLAN).__enter__()
    assert not (tmp_path / PLAN_NAME).exists()


def test_a_damaged_plan(tmp_path: Path) -> None:
    for damage in (b"\xff{", b"[1]", b'{"schema": 1}'):
        (tmp_path / PLAN_NAME).write_bytes(damage)
        with pytest.raises(ArtifactError, match="is damaged; remove .* and start again"):
            open_stage(tmp_path, PLAN).__enter__()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot write to .*Choose a directory you may write"):
            open_stage(path, PLAN).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_forbidden_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="Permission denied.*Choose a directory"):
            open_stage(tmp_path, PLAN).__enter__()
    finally:
        tmp_path.chmod(0o700)


def test_first_difference() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", 2, 3)
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a", [1], [1, 2])
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)
    assert first_difference({"a": 1}, [1]) == ("", {"a": 1}, [1])
