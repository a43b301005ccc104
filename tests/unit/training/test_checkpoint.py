"""Checkpoints appear whole or not at all, and the last good one always loads."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training.checkpoint import (
    TrainState,
    best_checkpoint,
    checkpoint_path,
    list_checkpoints,
    load_newest,
    prune_checkpoints,
    write_checkpoint,
)
from tests.unit.training.train_support import Notes


@pytest.fixture(scope="module")
def head() -> Eagle3Head:
    return tiny_head(target_of(tiny_model()))


def state(
    head: Eagle3Head, step: int, *, has_average: bool = False, **measures: float
) -> TrainState:
    """Weights that tell the step, so that a mix of two states would be seen."""
    weights = {name: one + step for name, one in head.state_dict().items()}
    return TrainState(
        step=step,
        tokens=100 * step,
        weights=weights,
        moments={
            name: {"exp_avg": one * 0 + step, "exp_avg_sq": one * 0 + 2 * step}
            for name, one in weights.items()
        },
        average={name: one * 2 for name, one in weights.items()} if has_average else None,
        measures=measures,
    )


def write(run: Path, head: Eagle3Head, one: TrainState) -> Path:
    head.load_state_dict(dict(one.average or one.weights))
    return write_checkpoint(run, head, one)


def check_same(found: TrainState | None, expected: TrainState) -> None:
    assert found is not None
    assert (found.step, found.tokens) == (expected.step, expected.tokens)
    assert found.measures == expected.measures
    assert (found.average is None) == (expected.average is None)
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight)
        for kind, moment in expected.moments[name].items():
            assert torch.equal(found.moments[name][kind], moment)
        if found.average is not None and expected.average is not None:
            assert torch.equal(found.average[name], expected.average[name])


@pytest.mark.parametrize("has_average", [False, True])
def test_what_is_written_comes_back(tmp_path: Path, head: Eagle3Head, has_average: bool) -> None:
    fresh = tiny_head(target_of(tiny_model()), seed=3)
    written = state(fresh, 4, has_average=has_average, accept_length=2.5)
    path = write(tmp_path, fresh, written)
    notes = Notes()
    check_same(load_newest(tmp_path, notes), written)
    assert notes.lines == []
    served = load_head(path).state_dict()
    shown = written.average or written.weights
    assert all(torch.equal(served[name], shown[name]) for name in shown)


def test_a_run_without_checkpoints_has_no_state(tmp_path: Path) -> None:
    assert load_newest(tmp_path, Notes()) is None
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    tmp_path: Path, head: Eagle3Head, name: str, damage: str
) -> None:
    older, newer = state(head, 2), state(head, 4)
    write(tmp_path, head, older)
    file = write(tmp_path, head, newer) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content if damage == "flip" else content[:-7])
    notes = Notes()
    check_same(load_newest(tmp_path, notes), older)
    assert len(notes.lines) == 1
    assert name in notes.lines[0]
    assert "Going on from the checkpoint before it" in notes.lines[0]
    assert not checkpoint_path(tmp_path, 4).exists()


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.json"])
def test_a_checkpoint_that_lost_a_file_is_damaged(
    tmp_path: Path, head: Eagle3Head, name: str
) -> None:
    older = state(head, 2)
    write(tmp_path, head, older)
    (write(tmp_path, head, state(head, 4)) / name).unlink()
    notes = Notes()
    check_same(load_newest(tmp_path, notes), older)
    assert f"{name} is " in notes.lines[0]


def test_a_head_without_a_state_stays_when_there_is_nothing_to_go_on_from(
    tmp_path: Path, head: Eagle3Head
) -> None:
    path = write(tmp_path, head, state(head, 4))
    (path / "state.safetensors").unlink()
    notes = Notes()
    assert load_newest(tmp_path, notes) is None
    assert notes.lines == [f"{path} is a head without a state. Looking at the one before it."]
    assert load_head(path).config == head.config


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_while_writing_leaves_the_last_good_checkpoint(
    tmp_path: Path, head: Eagle3Head
) -> None:
    """The process ends at its first file operation, at its second, and so on to the last."""
    older, newer = state(head, 2), state(head, 4)
    num_kills = 0
    while True:
        run = tmp_path / f"kill-{num_kills}"
        write(run, head, older)
        head.load_state_dict(dict(newer.weights))
        is_finished = _write_and_die(run, head, newer, at_operation=num_kills + 1)
        notes = Notes()
        found = load_newest(run, notes)
        assert found is not None
        check_same(found, newer if found.step == 4 else older)
        assert notes.lines == []
        assert not list((run / "checkpoints").glob(".*"))
        if is_finished:
            assert found.step == 4
            break
        num_kills += 1
    assert num_kills > 5


def _write_and_die(run: Path, head: Eagle3Head, state: TrainState, *, at_operation: int) -> bool:
    """Write in a child that kills itself at a file operation; True if it got to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir"):
                count += 1
                if count == at_operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        write_checkpoint(run, head, state)
        prune_checkpoints(run, 1, step=state.step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)


def test_old_checkpoints_become_heads_only(tmp_path: Path, head: Eagle3Head) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, head, state(head, step))
        prune_checkpoints(tmp_path, 0, step=step)
    has_state = [
        (record.step, (record.directory / "state.safetensors").exists())
        for record in list_checkpoints(tmp_path)
    ]
    assert has_state == [(1, False), (2, False), (3, True), (4, True)]
    assert load_head(checkpoint_path(tmp_path, 1)).config == head.config


def test_the_newest_and_the_best_stay(tmp_path: Path, head: Eagle3Head) -> None:
    for step, accept_length in ((1, 1.5), (2, 2.5), (3, 2.0), (4, 2.1), (5, 2.2)):
        write(tmp_path, head, state(head, step, accept_length=accept_length))
        prune_checkpoints(tmp_path, 2, step=step)
    records = list_checkpoints(tmp_path)
    assert [record.step for record in records] == [2, 4, 5]
    best = best_checkpoint(records)
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize("keep", [0, 1])
def test_a_run_that_began_anew_keeps_its_own_state(
    tmp_path: Path, head: Eagle3Head, keep: int
) -> None:
    for step in (2, 4, 6, 8):
        path = write(tmp_path, head, state(head, step, accept_length=1.0 + step))
        (path / "state.safetensors").unlink()
    again = state(head, 2, accept_length=3.0)
    write(tmp_path, head, again)
    prune_checkpoints(tmp_path, keep, step=2)
    check_same(load_newest(tmp_path, Notes()), again)


def test_the_best_is_the_earliest_of_equals_and_the_newest_of_unmeasured(
    tmp_path: Path, head: Eagle3Head
) -> None:
    assert best_checkpoint([]) is None
    for step in (1, 2):
        write(tmp_path, head, state(head, step))
    records = list_checkpoints(tmp_path)
    assert best_checkpoint(records) is records[-1]
    equal = [replace(record, measures={"ideal_speed_up": 2.0}) for record in records]
    assert best_checkpoint(equal) is equal[0]
    promised = [
        replace(record, measures={"accept_length": 1.0, "ideal_speed_up": 1.0 + record.step})
        for record in records
    ]
    assert best_checkpoint(promised) is promised[-1]
