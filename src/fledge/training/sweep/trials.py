"""Trials on disk: what each was given, and what came of it.

trials/0003/trial.json     values of the settings that are varied; written before it starts
trials/0003/run/           an ordinary run directory of `fledge train`
trials/0003/result.json    how it ended; a trial without one goes on when the sweep does
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fledge.contracts.errors import ArtifactError
from fledge.store.manifest import write_json
from fledge.training.curves import read_curves

State = Literal["finished", "stopped", "failed"]
TRIALS = "trials"
_TRIAL, _RESULT, _RUN = "trial.json", "result.json", "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a trial ended."""

    state: State
    score: float | None = None
    """Best accept length on held-out prompts; what curves promise where nothing was decoded."""

    best_step: int | None = None
    steps: int = 0
    planned_steps: int = 0
    loss: float | None = None
    """On held-out samples, at the best step."""

    ideal_speed_up: float | None = None
    scores: list[float] = field(default_factory=list)
    """At each measurement."""

    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One combination of values."""

    number: int
    """Counted from 1."""

    values: dict[str, Any]
    directory: Path
    result: Result | None = None

    @property
    def run(self) -> Path:
        return self.directory / _RUN

    def begin(self) -> None:
        """From now on the trial has these values."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(self.directory / _TRIAL, {"number": self.number, "values": self.values})

    def end(self, result: Result) -> "Trial":
        write_json(self.directory / _RESULT, asdict(result))
        return Trial(
            number=self.number, values=self.values, directory=self.directory, result=result
        )


def trial_directory(out: Path, number: int) -> Path:
    return out / TRIALS / f"{number:04d}"


def list_trials(out: Path) -> list[Trial]:
    """Every trial that was begun, in order."""
    folder = out / TRIALS
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_read(path) for path in paths if (path / _TRIAL).is_file()]


def read_scores(run: Path) -> dict[int, float]:
    """Scores of a run that was begun before, by step, as its curves have them."""
    scores: dict[int, float] = {}
    for kind, name in (("held_out", "ideal_speed_up"), ("decode", "accept_length")):
        for record in read_curves(run):
            value = record.figures.get(name)
            if record.kind == kind and isinstance(value, int | float):
                scores[record.step] = value
    return scores


def _read(path: Path) -> Trial:
    try:
        begun = json.loads((path / _TRIAL).read_bytes())
        result = None
        if (path / _RESULT).is_file():
            result = Result(**json.loads((path / _RESULT).read_bytes()))
        return Trial(number=begun["number"], values=begun["values"], directory=path, result=result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error!r}); remove it, and the trial is made again."
        ) from error
