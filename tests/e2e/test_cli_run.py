"""`fledge run` as a user runs it: the whole road, killed on the way; what is refused."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fledge.contracts.run_settings import STAGES
from fledge.store.local_place import LocalPlace
from fledge.testing_language import ask
from tests.e2e.conftest import RunProgram

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
OWN_RECIPE = """
[[prepare.sources]]
name = "own"
path = "own.jsonl"
licence = "MIT"

[tokenize]
as_recorded = true

[run]
stages = ["tokenize", "prepare"]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The first two stages only: conversations as they were recorded become a corpus."""
    rows = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "yes"}]}
        for one in ask(6)
    ]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = tmp_path / "own.toml"
    path.write_text(OWN_RECIPE)
    return path


def states(document: str) -> list[str]:
    return [stage["state"] for stage in json.loads(document)["stages"]]


def test_stages_are_made_once_and_never_of_other_settings(
    run: RunProgram, recipe: Path, target_dir: Path, tmp_path: Path
) -> None:
    words = ["run", recipe, "--out", tmp_path / "out", "--target", target_dir, "--device", "cpu"]
    planned = run(*words, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "prepare:    to do; about 6 rows" in planned.stdout
    assert "tokenize:   to do; known when prepare is finished" in planned.stdout
    assert not (tmp_path / "out").exists()
    first = run(*words)
    assert (first.exit_code, first.stdout) == (0, f"{tmp_path / 'out'}\n"), first.stderr
    assert first.stderr.index("stage 1 of 2: prepare") < first.stderr.index("stage 2 of 2")
    again = run(*words, "--json")
    assert states(again.stdout) == ["finished before", "finished before"]
    assert states(run(*words, "--plan", "--json").stdout) == ["finished", "finished"]

    changed = [*words, "--set", "tokenize.max_tokens=100"]
    plan = json.loads(run(*changed, "--plan", "--json").stdout)
    assert [stage["state"] for stage in plan["stages"]] == ["finished", "refused"]
    assert plan["stages"][1]["seconds"] is None
    refused = run(*changed)
    assert refused.exit_code == 1
    assert refused.error.startswith(f"stage tokenize: {tmp_path / 'out' / 'tokenize'} holds")
    assert "settings.max_tokens = 2048, and this run has settings.max_tokens = 100" in refused.error
    assert "Kept: prepare." in refused.error
    assert refused.error.endswith("--set tokenize.max_tokens=100 --redo tokenize")
    redone = run(*changed, "--redo", "tokenize", "--json")
    assert redone.exit_code == 0, redone.stderr
    assert states(redone.stdout) == ["finished before", "made"]
    plan = json.loads(run(*changed, "--set", "prepare.rows=3", "--plan", "--json").stdout)
    assert [stage["state"] for stage in plan["stages"]] == ["refused", "finished, not compared"]


def test_a_failure_names_the_stage_and_keeps_the_others(
    run: RunProgram, recipe: Path, target_dir: Path, tmp_path: Path
) -> None:
    words = ["run", recipe, "--out", tmp_path / "out"]
    failed = run(*words, "--target", "./none", "--set", "prepare.seed=1")
    assert failed.exit_code == 1
    assert failed.error.startswith("stage tokenize: none does not exist.")
    assert "Kept: prepare. To go on: fledge run " in failed.error
    assert failed.error.endswith("--target ./none --set prepare.seed=1")
    gone_on = run(*words, "--target", target_dir, "--set", "prepare.seed=1", "--json")
    assert states(gone_on.stdout) == ["finished before", "made"]


def test_what_is_refused(run: RunProgram, recipe: Path, tmp_path: Path) -> None:
    words = ["run", recipe, "--out", tmp_path / "out"]
    assert "there is no recipe" in run("run", tmp_path / "no.toml", "--out", tmp_path / "o").error
    assert "--redo 'tokenise' is no stage" in run(*words, "--redo", "tokenise").error
    assert "--plan changes nothing" in run(*words, "--redo", "tokenize", "--plan").error
    gap = run(*words, "--set", 'run.stages=["train"]')
    assert (gap.exit_code, "add tokenize to run.stages" in gap.error) == (2, True)
    other = tmp_path / "without.toml"
    other.write_text('[run]\nstages = ["prepare"]\n')
    missing = run("run", other, "--out", tmp_path / "out")
    assert (missing.exit_code, "has no [prepare] table" in missing.error) == (2, True)
    assert not (tmp_path / "out" / "prepare").exists()


def whole_road(tmp_path: Path, target: Path) -> list[str]:
    """The tiny recipe with a tiny target, which answers prompts of its own language."""
    prompts, suite = tmp_path / "prompts.jsonl", tmp_path / "suite.jsonl"
    for path, texts in ((prompts, ask(40, seed=2)), (suite, ask(2, seed=9))):
        path.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))
    settings = {
        "prepare.sources.0.path": str(prompts),
        "prepare.duplicates.near": "false",
        "tokenize.max_tokens": "128",
        "capture.layers": "[1, 2, 3]",
        "train.batch_tokens": "256",
        "train.micro_tokens": "256",
        "train.max_steps": "8",
        "train.held_out.every": "4",
        "train.held_out.decode_prompts": "1",
        "train.held_out.decode_tokens": "8",
        "select.max_tokens": "16",
        "select.suites": f'["{suite}"]',
        "tune.suites": f'["{suite}"]',
        "tune.max_tokens": "16",
        "tune.depths": "[2]",
        "tune.budgets": "[4]",
        "tune.controllers": '["fixed"]',
        "bench.prompts": str(suite),
        "bench.concurrency": "[1]",
        "bench.requests": "2",
        "bench.max_tokens": "8",
        "run.exports": '["vllm", "sglang"]',
    }
    words = ["run", str(RECIPE), "--out", str(tmp_path / "out"), "--target", str(target)]
    words += ["--device", "cpu"]
    return words + [word for pair in settings.items() for word in ("--set", "=".join(pair))]


def kill_when(process: subprocess.Popen[bytes], out: Path, pattern: str) -> None:
    while not list(out.glob(pattern)):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_whole_road_killed_on_the_way(
    run: RunProgram, program: list[str], language_target: Path, tmp_path: Path
) -> None:
    out, words = tmp_path / "out", whole_road(tmp_path, language_target)
    process = subprocess.Popen(
        [*program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kill_when(process, out, "train/checkpoints/step-*")
    assert not (out / "export").exists()
    resumed = run(*words, "--json")
    assert resumed.exit_code == 0, resumed.stderr
    document = json.loads(resumed.stdout)
    assert [stage["name"] for stage in document["stages"]] == list(STAGES)
    assert states(resumed.stdout)[:4] == ["finished before"] * 4
    assert states(resumed.stdout)[5:] == ["made"] * 5
    head = Path(document["head"])
    assert (head.parent, (head / "config.json").exists()) == (out / "train" / "checkpoints", True)
    assert list(document["exports"]) == ["vllm", "sglang"]
    assert "--speculative-config" in document["exports"]["vllm"]["serve_command"]
    page = Path(document["report"]).read_text()
    for title in ("Selection", "Tuning", "Bench", "Training"):
        assert title in page
    measured = (out / "bench" / "bench.json").read_bytes()
    (out / "export" / "vllm" / "config.json").unlink()
    plan = run(*words, "--plan", "--json").stdout
    assert states(plan) == ["finished"] * 8 + ["refused", "to do"]
    assert "vllm/config.json is not there any more" in json.loads(plan)["stages"][8]["work"]
    assert (out / "bench" / "bench.json").read_bytes() == measured


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_by_two_processes(run: RunProgram, language_target: Path, tmp_path: Path) -> None:
    words = whole_road(tmp_path, language_target)
    words += ["--set", "run.processes=2", "--set", "train.micro_tokens=128"]
    words += ["--set", 'run.stages=["prepare", "regenerate", "tokenize", "train", "report"]']
    made = run(*words, "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["head"] == str(tmp_path / "out" / "train")
    again = [*words, "--set", "train.seed=1"]
    assert "holds finished work with settings.seed = 0" in run(*again).error
    shutil.rmtree(tmp_path / "out" / "train")
    with LocalPlace(tmp_path / "out" / "train").locked():
        failed = run(*again)
    assert "training in 2 processes ended with exit code" in failed.error
