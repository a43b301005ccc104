"""`fledge demo`, `fledge doctor`, `fledge --version`."""

import json
from pathlib import Path

import pytest

from fledge import __version__
from fledge.cli import machine
from fledge.store.cache_marker import Source, write_marker
from tests.e2e.conftest import RunProgram


def test_demo_of_a_target_without_a_head(run: RunProgram, target_dir: Path) -> None:
    options = ("demo", "--target", target_dir, "--max-tokens", 20)
    document = json.loads(run(*options, "--json").stdout)
    assert set(document) == {
        "target",
        "target_dir",
        "head",
        "prompt",
        "text",
        "num_tokens",
        "tokens_per_s",
    }
    assert document["head"] is None
    shown = run(*options)
    assert shown.exit_code == 0
    assert shown.stdout == document["text"] + "\n"
    assert "tokens/s" in shown.stderr
    assert f"{target_dir} has no head" in shown.stderr
    assert "fledge chat" in shown.stderr


def test_doctor_knows_this_machine(run: RunProgram, tmp_path: Path) -> None:
    cached = tmp_path / "cache" / "targets" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    write_marker(cached, Source(source="some-target", sha256="0", quantisation="none"))
    outcome = run("doctor", "--json")
    facts = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert facts["fledge"] == __version__
    assert facts["packages"]["torch"].startswith("2.")
    assert set(facts["required_packages"]) >= {"torch", "transformers", "typer"}
    assert facts["cpu_cores"] >= 1
    assert facts["cache"]["directory"] == str(tmp_path / "cache")
    assert facts["cache"]["targets"] == [
        {"name": "some-target", "directory": str(cached), "bytes": 2}
    ]
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "some-target" in shown.stdout
    assert "ready to use" in shown.stdout


def test_doctor_fails_when_something_needed_is_missing(
    run: RunProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "core_requirements", lambda: ["torch", "no-such-package"])
    monkeypatch.setenv("PATH", "")
    outcome = run("doctor")
    assert outcome.exit_code == 1
    assert "MISSING   no no-such-package" in outcome.stdout
    assert "optional  no npm" in outcome.stdout
    assert "1 problem to solve" in outcome.stdout


def test_version_and_bare_call(run: RunProgram) -> None:
    assert run("--version").stdout == f"fledge {__version__}\n"
    bare = run()
    assert bare.exit_code == 0
    assert "generate" in bare.stdout


def test_help_is_wrapped_by_the_terminal(run: RunProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in run("demo", "--help").stdout.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("A few prompts"))
    paragraph = lines[first : lines.index("", first)]
    assert len(paragraph) > 2
    assert all(len(line) > 60 for line in paragraph[:-1]), "no line ends early"
