"""The stage behind `fledge sweep`: features in; many short runs, one table and one plot out.

Trials run one after another in this process, beside one target that is loaded once. Each is an
ordinary run directory. A killed sweep goes on with the trial that it was at, from its checkpoint.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import CapacityError, ConfigError, FledgeError, TrainingError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.sweep_settings import SweepSettings
from fledge.contracts.toml_settings import to_plain
from fledge.contracts.train_settings import TrainSettings
from fledge.models.placement import pick_dtype
from fledge.models.target import Target
from fledge.store.capacity import translated_disk_errors
from fledge.store.manifest import SWEEP, Manifest, Plan
from fledge.store.stage_directory import open_stage
from fledge.training.assembly import load_target
from fledge.training.measuring import Measures
from fledge.training.sources import refuse_long_samples
from fledge.training.stage import train
from fledge.training.sweep.proposals import count_trials, propose, require_optuna
from fledge.training.sweep.pruning import is_hopeless
from fledge.training.sweep.report import write_report, write_table
from fledge.training.sweep.space import Values, apply_values, check_space, describe
from fledge.training.sweep.trials import (
    Result,
    State,
    Trial,
    list_trials,
    read_scores,
    trial_directory,
)
from fledge.training.train_input import TrainInput

_ENDS_A_TRIAL = (TrainingError, CapacityError, ConfigError, torch.OutOfMemoryError)
"""What may be a fault of a trial's values. Anything else is wrong for every trial."""


def sweep(
    given: TrainInput,
    settings: SweepSettings,
    base: TrainSettings,
    out: Path,
    *,
    progress: Progress | None = None,
) -> Manifest:
    """Run all trials that have no result yet; `base` has the settings that are not varied."""
    check_sweep(settings, base)
    plan = Plan(
        kind=SWEEP,
        settings={"sweep": to_plain(settings), "train": to_plain(base)},
        parents=dict(given.plan(base).parents),
        identity=dict(given.plan(base).identity),
    )
    with (
        translated_disk_errors(out, place="output"),
        open_stage(out, plan, has_results=lambda path: bool(list_trials(path))) as stage,
    ):
        if not stage.is_finished:
            runner = _Runner(given, settings, base, out, progress or SilentProgress())
            trials = runner.run()
            files = write_report(out, settings, trials)
            if all(trial.result is not None and trial.result.state == "failed" for trial in trials):
                first = trials[0].result
                assert first is not None
                raise TrainingError(
                    f"all {len(trials)} trials failed; the first because {first.error} Remove "
                    f"{trials[0].directory.parent} to try them again."
                )
            stage.finish(counts=_count(trials), files=files, device=str(given.device))
    return stage.manifest


def check_sweep(settings: SweepSettings, base: TrainSettings) -> None:
    """What can be known to be wrong before anything runs."""
    check_space(settings, base)
    if base.held_out.share == 0:
        raise ConfigError(
            "train.held_out.share is 0, and trials are compared on held-out samples; set it, for "
            "instance to 0.02."
        )
    if settings.method == "tpe":
        require_optuna()


def trial_settings(base: TrainSettings, values: Values) -> TrainSettings:
    """The settings of one trial; of its checkpoints only the newest and the best stay."""
    settings = apply_values(base, values)
    return replace(settings, keep_checkpoints=settings.keep_checkpoints or 1)


@dataclass(slots=True)
class _Runner:
    """Trials one after another, and what they share."""

    given: TrainInput
    settings: SweepSettings
    base: TrainSettings
    out: Path
    progress: Progress
    targets: dict[torch.dtype, Target] = field(default_factory=dict)
    """At most one: a trial with another precision loads its own instead."""

    def run(self) -> list[Trial]:
        begun = {trial.number: trial for trial in list_trials(self.out)}
        ended = {number: one for number, one in begun.items() if one.result is not None}
        total = count_trials(self.settings)
        if ended:
            self.progress.note(f"{len(ended)} of {total} trials were run before.")
        for number in range(1, total + 1):
            if number not in ended:
                # As if the later ones were not there: somebody may have removed one to repeat it.
                earlier = [ended[one] for one in sorted(ended) if one < number]
                trial = begun.get(number) or self._begin(number, earlier)
                if trial is None:
                    break
                ended[number] = self._run_one(trial, earlier, total)
                write_table(self.out, self.settings, list(ended.values()))
        return list(ended.values())

    def _begin(self, number: int, earlier: Sequence[Trial]) -> Trial | None:
        values = propose(self.settings, earlier, number)
        if values is None:
            return None
        trial = Trial(
            number=number, values=dict(values), directory=trial_directory(self.out, number)
        )
        trial.begin()
        return trial

    def _run_one(self, trial: Trial, others: Sequence[Trial], total: int) -> Trial:
        self.progress.note(f"trial {trial.number} of {total}: {describe(trial.values)}")
        scores = read_scores(trial.run)
        try:
            manifest = self._train(trial, scores, others)
        except _ENDS_A_TRIAL as error:
            if isinstance(error.__cause__, OSError):
                # A full or forbidden disk: the trial goes on when the sweep does.
                raise
            text = str(error) if isinstance(error, FledgeError) else "the memory was used up."
            ended = trial.end(_failed(trial, text))
            self.progress.note(f"trial {trial.number} failed: {text}")
        else:
            ended = trial.end(_ended(manifest.counts, read_scores(trial.run)))
            self.progress.note(f"trial {trial.number} {_outcome(ended)}")
        finally:
            # What a trial allocated must not stand in the way of the next one.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return ended

    def _train(self, trial: Trial, scores: dict[int, float], others: Sequence[Trial]) -> Manifest:
        settings = trial_settings(self.base, trial.values)
        refuse_long_samples(self.given.samples, settings.micro_tokens)
        rivals = [one.result.scores for one in others if one.result is not None]

        def watch(step: int, measures: Measures) -> bool:
            found = measures.accept_length or measures.depth.ideal_speed_up
            if found is not None:
                scores[step] = found
            own = [scores[one] for one in sorted(scores) if one <= step]
            return is_hopeless(self.settings.stop, own, rivals, grace=self.settings.grace)

        return train(
            self.given,
            settings,
            trial.run,
            progress=self.progress,
            target=self._target(settings),
            watch=watch,
        )

    def _target(self, settings: TrainSettings) -> Target:
        dtype = pick_dtype(settings.dtype, self.given.device)
        if dtype not in self.targets:
            self.targets.clear()
            self.targets[dtype] = load_target(self.given, settings, self.progress)
        return self.targets[dtype]


def _ended(counts: Any, scores: dict[int, float]) -> Result:
    best, steps, planned = counts["best"], counts["steps"], counts["planned_steps"]
    state: State = "stopped" if steps < planned else "finished"
    score = best.get("accept_length")
    return Result(
        state=state,
        score=score if score is not None else best.get("ideal_speed_up"),
        best_step=counts["best_step"],
        steps=steps,
        planned_steps=planned,
        loss=best.get("loss"),
        ideal_speed_up=best.get("ideal_speed_up"),
        scores=[scores[step] for step in sorted(scores)],
    )


def _failed(trial: Trial, error: str) -> Result:
    scores = read_scores(trial.run)
    return Result(
        state="failed",
        steps=max(scores, default=0),
        scores=[scores[step] for step in sorted(scores)],
        error=error,
    )


def _outcome(trial: Trial) -> str:
    assert trial.result is not None
    result = trial.result
    score = "nothing measured" if result.score is None else f"{result.score:.3f}"
    if result.state == "stopped":
        return f"given up after {result.steps:,} of {result.planned_steps:,} steps: {score}"
    return f"finished: {score}"


def _count(trials: Sequence[Trial]) -> dict[str, Any]:
    states = [trial.result.state for trial in trials if trial.result is not None]
    return {
        "trials": len(trials),
        **{state: states.count(state) for state in ("finished", "stopped", "failed")},
    }
