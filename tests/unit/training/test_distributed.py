"""Two processes on one run: the curve of one process, and either goes on with the other's state.

Losses agree to six digits: sums over micro-batches are taken in another order.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import Parallel
from fledge.training.checkpoint import checkpoint_path, list_checkpoints
from fledge.training.distributed import Processes, joined_processes
from tests.unit.training.train_support import CPU, SHORT, curve, losses, run, with_optimizer
from tests.warm_programs import WarmPrograms

SETTINGS = replace(with_optimizer(SHORT, ema=0.9), max_steps=4, batch_tokens=288, hidden_noise=0.05)
"""Three micro-batches a step, so that two processes cannot share them evenly."""

TOLERANCE = 1e-6


def words_of_train(target: Path, out: Path, features: Path) -> list[object]:
    """The program as a user starts it, with the settings above."""
    words = {
        "max_steps": 4,
        "epochs": 2,
        "micro_tokens": 96,
        "batch_tokens": 288,
        "hidden_noise": 0.05,
        "loss.steps": 3,
        "optimizer.ema": 0.9,
        "held_out.share": 0.1,
        "held_out.every": 2,
        "held_out.decode_prompts": 0,
    }
    return [
        *("-m", "fledge", "train", "--features", features, "--target", target, "--out", out),
        *(part for name, value in words.items() for part in ("--set", f"train.{name}={value}")),
        *("--device", "cpu"),
    ]


def run_torchrun(words: Sequence[object], out: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = [*torchrun, "--nproc-per-node", 2, *words]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out), "only the first process speaks"


def surroundings() -> list[dict[str, str]]:
    """What torchrun tells two processes, so that they find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [{**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(2)]


def run_as_torchrun(warm: WarmPrograms, words: Sequence[object], out: Path) -> None:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    programs = [
        warm.start([sys.executable, *words], env={**os.environ, **told}, text=True, **streams)
        for told in surroundings()
    ]
    said = [program.communicate(timeout=200) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    assert [stdout for stdout, _ in said] == [f"{out}\n", ""], "only the first process speaks"


def run_forked(target: Path, out: Path, features: Path, parallel: Parallel) -> None:
    """The same without two more programs to start."""
    children = []
    for told in surroundings():
        child = os.fork()
        if child == 0:
            os.environ |= told
            exit_code = 1
            try:
                with joined_processes(CPU) as processes:
                    settings = replace(SETTINGS, parallel=parallel)
                    run(target, out, settings, features=features, processes=processes)
                exit_code = 0
            finally:
                os._exit(exit_code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]


def cut_back(out: Path, step: int) -> None:
    """As if the run had been killed behind a checkpoint."""
    (out / "manifest.json").unlink()
    for record in list_checkpoints(out):
        if record.step > step:
            shutil.rmtree(record.directory)


def check_same(out: Path, expected: Path) -> None:
    for kind in ("train", "held_out"):
        ours, theirs = losses(out, kind), losses(expected, kind)
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    for (_, ours), (_, theirs) in zip(curve(out), curve(expected), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["num_labels"] == theirs["num_labels"]


@pytest.fixture(scope="module")
def alone(folder: Path, tiny_target: Path, tiny_features: Path) -> Path:
    run(tiny_target, folder / "alone", SETTINGS, features=tiny_features)
    return folder / "alone"


@pytest.mark.parametrize("is_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ddp_has_the_curve_of_one_process_which_can_go_on(
    warm: WarmPrograms,
    tmp_path: Path,
    tiny_target: Path,
    tiny_features: Path,
    alone: Path,
    is_torchrun: bool,
) -> None:
    out = tmp_path / "run"
    words = words_of_train(tiny_target, out, tiny_features)
    if is_torchrun:
        run_torchrun(words, out)
    else:
        run_as_torchrun(warm, words, out)
    check_same(out, alone)
    cut_back(out, 2)
    run(tiny_target, out, SETTINGS, features=tiny_features)
    check_same(out, alone)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fsdp_goes_on_from_one_process(
    tmp_path: Path, tiny_target: Path, tiny_features: Path, alone: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(alone, out)
    cut_back(out, 2)
    run_forked(tiny_target, out, tiny_features, "fsdp")
    check_same(out, alone)
    # Whole states, as one process writes them.
    files = [checkpoint_path(place, 4) / "state.safetensors" for place in (out, alone)]
    assert files[0].stat().st_size == files[1].stat().st_size


def test_one_process_needs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined_processes(CPU) as processes:
        assert (processes.rank, processes.count, processes.is_first) == (0, 1, True)
        assert processes.share([1, 2, 3]) == [1, 2, 3]
        assert processes.gather("here") == ["here"]
        assert processes.sum(torch.ones(2)).tolist() == [1.0, 1.0]


def test_work_is_dealt_out_in_turns() -> None:
    assert Processes(1, 3).share(list(range(7))) == [1, 4]


def test_a_process_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ConfigError, match="process 5 .* there are 2; lower --nproc-per-node"),
        joined_processes(torch.device("cuda")),
    ):
        pass
