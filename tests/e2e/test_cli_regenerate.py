"""`fledge regenerate` as a user runs it."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fledge.store.rows import read_rows
from tests.e2e.conftest import RunProgram
from tests.unit.data.batch_server import BatchServer
from tests.unit.data.flaky_server import FlakyServer
from tests.unit.data.regenerate_support import make_source, output_bytes, simple_rows

ROOT = Path(__file__).parents[2]
BEYOND_A_SMALL_MACHINE = (
    *("torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub"),
    *("gguf", "numpy", "stdnum", "zstandard", "xxhash", "pyarrow", "obstore"),
)
WITHOUT_TORCH = f"""
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BEYOND_A_SMALL_MACHINE!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
from fledge.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "c", simple_rows(30))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_answers_through_a_url(run: RunProgram, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers"
    with FlakyServer() as server:
        made = run("regenerate", source, "--out", out, "--url", server.url)
        assert (made.exit_code, made.stdout) == (0, f"{out}\n")
        assert "asking tiny (30 rows)" in made.stderr
        assert f"30 rows with 30 answers in {out}" in made.stderr
        again = run("regenerate", source, "--out", out, "--url", server.url, "--json")
        assert server.answered.total() == 30
    document = json.loads(again.stdout)
    assert (document["out"], document["model"], document["rows"]) == (str(out), "tiny", 30)
    assert sum(document["temperatures"].values()) == 30
    assert len(list(read_rows(out))) == 30


def test_settings_come_from_the_recipe(run: RunProgram, source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[regenerate]\ntemperatures = [0.3]\nmax_tokens = 9\n")
    words = ["--recipe", recipe, "--set", "regenerate.seed=4"]
    with FlakyServer() as server:
        made = run("regenerate", source, "--out", tmp_path / "a", "--url", server.url, *words)
        assert made.exit_code == 0
        body = next(iter(server.bodies.values()))
    assert (body["temperature"], body["max_tokens"]) == (0.3, 9)
    wrong = run("regenerate", source, "--out", tmp_path / "b", "--set", "regenerate.sed=4")
    assert (wrong.exit_code, wrong.error) == (
        2,
        "regenerate has no setting `sed`; did you mean `seed`?",
    )


def test_batches(run: RunProgram, source: Path, tmp_path: Path) -> None:
    with BatchServer() as server:
        made = run("regenerate", source, "--out", tmp_path / "a", "--url", server.url, "--batch")
    assert made.exit_code == 0
    assert "batch batch_1: 30 questions handed in" in made.stderr


def test_plan(run: RunProgram, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers"
    before = run("regenerate", source, "--out", out, "--plan")
    assert before.exit_code == 0
    reads, asks, writes = before.stdout.splitlines()
    assert reads == "reads: 30 rows, 0 of them answered before"
    assert asks == "asks: 30 questions about 30 rows"
    assert writes.startswith("writes: about ")
    assert not out.exists()
    with FlakyServer() as server:
        run("regenerate", source, "--out", out, "--url", server.url)
    after = json.loads(run("regenerate", source, "--out", out, "--plan", "--json").stdout)
    assert (after["rows"], after["rows_done"], after["rows_to_ask"]) == (30, 30, 0)
    assert (after["questions"], after["needed_bytes"], after["is_finished"]) == (0, 0, True)


def test_in_this_process(run: RunProgram, target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "c", simple_rows(6))
    words = ("regenerate", source, "--target", target_dir, "--set", "regenerate.max_tokens=8")
    plain = run(*words, "--out", tmp_path / "plain", "--json")
    drafted = run(*words, "--out", tmp_path / "drafted", "--head", head_dir, "--json")
    assert (plain.exit_code, drafted.exit_code) == (0, 0)
    assert json.loads(plain.stdout)["model"] == "tiny"
    assert output_bytes(tmp_path / "plain") == output_bytes(tmp_path / "drafted")
    for row in read_rows(tmp_path / "plain"):
        assert row.answers[0].token_ids


MISTAKES = {
    "a way without a URL": (["--model", "x"], "--model goes with --url, and no URL was given."),
    "two targets": (["--url", "http://x", "--target", "y"], "--url and --target exclude"),
    "no URL": (["--url", "x"], "--url 'x' is not a URL; it must be like"),
    "no key": (["--url", "http://x", "--api-key-env", "NONE"], "--api-key-env names NONE, which"),
}


@pytest.mark.parametrize(("words", "error"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(
    run: RunProgram, source: Path, tmp_path: Path, words: list[str], error: str
) -> None:
    made = run("regenerate", source, "--out", tmp_path / "out", *words)
    assert made.exit_code == 2
    assert made.error.startswith(error)
    assert not (tmp_path / "out").exists()


def test_failures(run: RunProgram, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    missing = run("regenerate", tmp_path / "nothing", "--out", out, "--url", "http://x")
    assert (missing.exit_code, missing.error) == (
        1,
        f"there is no directory {tmp_path / 'nothing'}.",
    )
    refused = ("--url", "http://127.0.0.1:9", "--set", "regenerate.retries=0")
    unreachable = run("regenerate", source, "--out", out, *refused)
    assert unreachable.exit_code == 1
    assert unreachable.error == (
        "no answer from http://127.0.0.1:9/v1/models: connection refused (1 attempt)."
    )
    with FlakyServer(api_key="sk-1") as server:
        unknown = run("regenerate", source, "--out", out, "--url", server.url)
        assert (unknown.exit_code, "refused the key" in unknown.error) == (2, True)
    with FlakyServer() as server:
        wrong = run("regenerate", source, "--out", out, "--url", server.url, "--model", "gpt")
        assert (wrong.exit_code, "The model `gpt` does not exist" in wrong.error) == (2, True)


def start(words: list[str], program: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, "regenerate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def test_a_url_needs_no_torch(source: Path, tmp_path: Path) -> None:
    with FlakyServer(api_key="sk-1") as server:
        words = [str(source), "--out", str(tmp_path / "out"), "--url", server.url]
        process = start(
            words,
            [sys.executable, "-c", WITHOUT_TORCH],
            env={**os.environ, "OPENAI_API_KEY": "sk-1"},
        )
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(list(read_rows(tmp_path / "out"))) == 30


def test_without_torch_the_target_cannot_run_here(source: Path, tmp_path: Path) -> None:
    words = [str(source), "--out", str(tmp_path / "out")]
    process = start(words, [sys.executable, "-c", WITHOUT_TORCH])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(
        r"error: this needs the package \w+, which is not installed; install fledge with "
        r"everything it needs: pip install fledge\.",
        stderr.splitlines()[-1],
    )


def test_interrupted_and_resumed(source: Path, tmp_path: Path, program: list[str]) -> None:
    out = tmp_path / "out"
    with FlakyServer(service_s=(0.2, 0.2)) as server:
        words = [str(source), "--out", str(out), "--url", server.url]
        process = start([*words, "--set", "regenerate.concurrency=2"], program)
        while server.answered.total() < 4:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout) == (130, "")
        assert stderr.splitlines()[-1] == (
            "interrupted; nothing that was finished is lost, the same command may be run again."
        )
        assert "Traceback" not in stderr
        process = start(words, program)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0
        assert re.search(r"\d+ of 30 rows were answered before\.", stderr)
        assert server.answered.total() <= 32
    assert len(list(read_rows(out))) == 30


def test_a_full_disk_and_then_room(source: Path, tmp_path: Path, program: list[str]) -> None:
    out = tmp_path / "out"

    def allow_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    with FlakyServer() as server:
        words = [str(source), "--out", str(out), "--url", server.url]
        process = start(words, program, preexec_fn=allow_little)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "error: the disk is full or a size limit was reached while writing to" in stderr
        assert "it goes on where it stopped" in stderr
        assert "Traceback" not in stderr
        process = start(words, program)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(list(read_rows(out))) == 30
