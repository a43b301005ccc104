"""Real directories for the program to load, made once; and the program, run in this process."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fledge import EngineSettings
from fledge.cli.main import main
from fledge.contracts.batch_settings import BatchSettings
from fledge.models.head_files import save_head
from fledge.models.shipped_heads import tuning_file
from fledge.models.target import Target
from fledge.testing import save_tiny_target, tiny_head
from tests.e2e.server_support import (
    CLIENT_TIMEOUT_S,
    KEY,
    KEYS_FILE,
    RunningServer,
    running_server,
)
from tests.shipped_pairs import ship, shipped_from, tuning
from tests.warm_programs import WarmPrograms


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template and a context of 512 tokens."""
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def roomy_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that never ends an answer by itself and has room for a very long one."""
    directory = tmp_path_factory.mktemp("targets") / "roomy"
    return save_tiny_target(directory, max_position_embeddings=1_000_000, eos_token_id=None)


@pytest.fixture(scope="session")
def plain_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target without a chat template."""
    directory = tmp_path_factory.mktemp("targets") / "plain"
    return save_tiny_target(directory, has_chat_template=False)


@pytest.fixture(scope="session")
def head_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the tiny target."""
    return _save_random_head(target_dir, tmp_path_factory.mktemp("heads") / "fits")


@pytest.fixture(scope="session")
def foreign_head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for a target of another hidden size."""
    other = save_tiny_target(tmp_path_factory.mktemp("targets") / "wide", hidden_size=64)
    return _save_random_head(other, tmp_path_factory.mktemp("heads") / "foreign")


@pytest.fixture(scope="session")
def limited_server(
    roomy_target_dir: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmPrograms
) -> Iterator[RunningServer]:
    """Room for two answers, and for two that wait; two keys, tight limits, no head.

    Starting an engine takes seconds, so all tests that can share one do. They leave it idle, with
    the settings and keys that they found.
    """
    place = tmp_path_factory.mktemp("limited-server")
    keys_file = place / "keys.txt"
    keys_file.write_text(KEYS_FILE, encoding="utf-8")
    with running_server(
        roomy_target_dir,
        cache=place,
        engine=EngineSettings(max_requests=2, cache_tokens=16384),
        warm=warm,
        key=KEY,
        api_keys_file=str(keys_file),
        max_body_bytes=20_000,
        max_prompt_tokens=300,
        max_answer_tokens=6000,
        max_choices=3,
        max_queue=2,
        client_timeout_s=CLIENT_TIMEOUT_S,
        batches=BatchSettings(
            directory=str(place / "batches"), max_file_bytes=50_000, max_lines=60, max_files=100
        ),
    ) as running:
        yield running


def _save_random_head(target_dir: Path, head_dir: Path) -> Path:
    target = Target.load(target_dir, dtype=torch.float32, device=torch.device("cpu"))
    save_head(tiny_head(target), head_dir)
    return head_dir


@dataclass(frozen=True)
class Run:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        assert "Traceback" not in self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.stderr
        return lines[0].removeprefix("error: ")


RunProgram = Callable[..., Run]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunProgram:
    """`fledge` with these arguments, in this process; stdin is what is given, or empty."""

    def run_program(*arguments: object, stdin: str = "") -> Run:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        return Run(exit_code, *capsys.readouterr())

    return run_program


@pytest.fixture
def program() -> list[str]:
    """The program as a separate process would start it."""
    return [sys.executable, "-m", "fledge"]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks into the user's cache, and none leaves settings behind."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", os.environ.get("TRANSFORMERS_VERBOSITY", "error"))


@pytest.fixture(scope="module")
def heads(
    tmp_path_factory: pytest.TempPathFactory, target_dir: Path, head_dir: Path
) -> Iterator[Path]:
    """The tiny target's head, as if it came with fledge, tuned for the CPU."""
    root = tmp_path_factory.mktemp("shipped")
    shipped = ship(head_dir, target_dir, root)
    document = tuning("", shipped.manifest.plan.identity["weights"])
    (shipped.directory / tuning_file("cpu")).write_text(json.dumps(document))
    with shipped_from(root):
        yield root
