"""`fledge select` as a user runs it: the plan, the ranking, the document, and what it refuses."""

import json
from pathlib import Path

from tests.e2e.conftest import RunProgram


def test_a_selection(run: RunProgram, target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    suite, out = tmp_path / "own.jsonl", tmp_path / "out"
    suite.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    words = ["select", head_dir, "--target", target_dir, "--out", out, "--suite", suite]
    words += ["--max-tokens", "4", "--repeats", "1", "--depth", "2", "--width", "1"]
    words += ["--budget", "2", "--controller", "fixed", "--dtype", "float32", "--device", "cpu"]
    planned = run(*words, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "measures: 1 head on 2 questions of 1 task" in planned.stdout
    plan = json.loads(run(*words, "--plan", "--json").stdout)
    assert (plan["visits"], plan["answers"], plan["most_tokens"]) == (2, 4, 16)
    assert not out.exists()
    first = run(*words)
    assert first.exit_code == 0, first.stderr
    assert first.stdout == f"{out}\n"
    assert f"1. {head_dir}: speed-up" in first.stderr
    assert "is the fastest head" in first.stderr
    card = json.loads(run(*words, "--json").stdout)
    assert (card["out"], card["best"], card["state"]) == (str(out), str(head_dir), "finished")
    assert card["settings"]["tree"] == {"depth": 2, "width": 1, "budget": 2}
    assert card["provenance"]["command"]


def test_what_is_refused(
    run: RunProgram,
    target_dir: Path,
    head_dir: Path,
    foreign_head_dir: Path,
    plain_target_dir: Path,
    tmp_path: Path,
) -> None:
    words = ("--target", target_dir, "--out", tmp_path / "out", "--device", "cpu")
    foreign = run("select", head_dir, foreign_head_dir, *words)
    assert foreign.exit_code == 1
    assert f"{foreign_head_dir} does not belong to this target" in foreign.error
    missing = run("select", tmp_path / "none", *words)
    assert "there is no directory" in missing.error
    suite = run("select", head_dir, *words, "--suite", "mtbench")
    assert (suite.exit_code, "there is no suite 'mtbench'" in suite.error) == (2, True)
    assert "concurrency is 0" in run("select", head_dir, *words, "--concurrency", "0").error
