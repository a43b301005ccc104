"""`fledge tune` as a user runs it, and `--tuned` of the verbs that read what it found."""

import json
import shutil
from pathlib import Path

import pytest

from fledge.testing import save_tiny_target
from tests.e2e.conftest import RunProgram


@pytest.fixture
def words(target_dir: Path, head_dir: Path, tmp_path: Path) -> list[object]:
    suite = tmp_path / "own.jsonl"
    suite.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    return [
        "tune", head_dir, "--target", target_dir, "--out", tmp_path / "out", "--suite", suite,
        "--max-tokens", "3", "--repeats", "1", "--depths", "2", "--widths", "1,2",
        "--budgets", "4", "--controllers", "fixed", "--dtype", "float32", "--device", "cpu",
        "--set", "tune.warm_up=0", "--set", "tune.finalists=1",
    ]  # fmt: skip


def test_a_tuning_and_what_reads_it(
    run: RunProgram,
    words: list[object],
    target_dir: Path,
    head_dir: Path,
    foreign_head_dir: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    planned = run(*words, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "tries: 2 of 2 shapes on 2 questions of 1 task" in planned.stdout
    plan = json.loads(run(*words, "--plan", "--json").stdout)
    assert plan["most_tokens"] == 3 * plan["answers"]
    assert not out.exists()
    first = run(*words)
    assert first.exit_code == 0, first.stderr
    assert first.stdout == f"{out}\n"
    assert "depth   width 1   width 2" in first.stderr
    assert f"fledge serve --head {head_dir} --tuned {out}" in first.stderr
    found = json.loads(run(*words, "--json").stdout)
    assert (found["out"], found["state"], found["head"]) == (str(out), "finished", str(head_dir))
    assert found["best"]["depth"] == 2

    ask = ("--target", target_dir, "--device", "cpu", "--tuned", out)
    answered = run("generate", "--prompt", "Hi", *ask, "--head", head_dir, "--max-tokens", 3)
    assert answered.exit_code == 0, answered.stderr
    talked = run("chat", *ask, "--head", head_dir, "--max-tokens", 3, stdin="Hi\n")
    assert talked.exit_code == 0, talked.stderr

    # What was tuned for others is refused.
    tuned = ("--tuned", out)
    words = ["generate", "--prompt", "Hi", *tuned]
    another = run(*words, "--target", target_dir, "--head", foreign_head_dir)
    assert f"{foreign_head_dir} holds another one; run `fledge tune`" in another.error
    save_tiny_target(tmp_path / "wide", hidden_size=64)
    target = run(*words, "--target", tmp_path / "wide", "--head", head_dir)
    assert f"{tmp_path / 'wide'} has other weights" in target.error
    none = run("serve", "--target", target_dir, *tuned)
    assert (none.exit_code, "and there is no head; add --head" in none.error) == (2, True)
    exported = run("export", foreign_head_dir, "--to", "vllm", "--out", tmp_path / "vllm", *tuned)
    assert "holds another one" in exported.error
    # The same head elsewhere is the same head.
    shutil.copytree(head_dir, tmp_path / "copy")
    same = run("export", tmp_path / "copy", "--to", "vllm", "--out", tmp_path / "vllm", *tuned)
    assert same.exit_code == 0, same.stderr


def test_what_is_refused(run: RunProgram, words: list[object], foreign_head_dir: Path) -> None:
    lists = run(*words, "--depths", "2,x")
    assert (lists.exit_code, "--depths '2,x' is no list of whole numbers" in lists.error) == (
        2,
        True,
    )
    assert "widths is [2, 1]" in run(*words, "--widths", "2,1").error
    assert "controller is 'clever'" in run(*words, "--controllers", "clever").error
    words[1] = foreign_head_dir
    assert f"{foreign_head_dir} does not belong to this target" in run(*words).error
