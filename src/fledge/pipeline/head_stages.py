"""The stages from a corpus to a head, as `fledge run` calls them."""

import subprocess
import sys

from fledge.contracts.errors import TrainingError
from fledge.contracts.run_settings import StageName
from fledge.features import capture, capture_job
from fledge.features.device_speed import measure_flops
from fledge.models.placement import pick_device, pick_dtype
from fledge.pipeline.road import Forecast, Road
from fledge.store.capacity import require_disk
from fledge.store.manifest import Manifest
from fledge.training import stage as train_stage
from fledge.training.train_input import TrainInput, open_input
from fledge.training.train_plan import TrainPlan, needed_disk, plan_training


def make_features(road: Road) -> Manifest:
    return capture.capture(_capture_input(road), road.place("capture"), road.progress)


def forecast_features(road: Road) -> Forecast:
    given = _capture_input(road)
    planned = capture_job.estimate(given, measure_flops(given.device, given.dtype))
    return Forecast(
        work=f"{given.corpus_facts.kept_tokens:,} tokens",
        written_bytes=planned.total_bytes,
        seconds=planned.seconds,
    )


def _capture_input(road: Road) -> capture_job.CaptureInput:
    place = pick_device(road.device)
    with road.progress.task(f"reading what is known of {road.target}", unit=""):
        return capture_job.open_input(
            road.place("tokenize"),
            road.target,
            road.recipe.capture,
            dtype=pick_dtype(road.dtype, place),
            device=place,
            progress=road.progress,
        )


def source_of_training(road: Road) -> tuple[StageName, ...]:
    """Stored features, or the corpus with the live target beside it."""
    return ("capture",) if road.has("capture") else ("tokenize",)


def make_head(road: Road) -> Manifest:
    out, settings = road.place("train"), road.recipe.train
    # First, so that what does not fit is said once and not by every process.
    given = _train_input(road)
    if not road.is_finished("train"):
        needed = needed_disk(_training_plan(given, road, is_timed=False), out)
        require_disk(out, needed, "the checkpoints", place="output")
        if road.recipe.run.processes > 1:
            _train_in_processes(road)
    return train_stage.train(given, settings, out, progress=road.progress)


def forecast_head(road: Road) -> Forecast:
    planned = _training_plan(_train_input(road), road, is_timed=True)
    processes = road.recipe.run.processes
    return Forecast(
        work=f"{planned.steps:,} steps, {planned.tokens:,} tokens"
        + (f", by {processes} processes" if processes > 1 else ""),
        written_bytes=planned.stored_bytes,
        seconds=None if planned.seconds is None else planned.seconds / processes,
    )


def _training_plan(given: TrainInput, road: Road, *, is_timed: bool) -> TrainPlan:
    settings = road.recipe.train
    dtype = pick_dtype(settings.dtype, given.device)
    flops_per_s = measure_flops(given.device, dtype) if is_timed else None
    return plan_training(given, settings, itemsize=dtype.itemsize, flops_per_s=flops_per_s)


def _train_input(road: Road) -> TrainInput:
    (source,) = source_of_training(road)
    with road.progress.task(f"reading what is known of {road.target}", unit=""):
        return open_input(
            features=road.place(source) if source == "capture" else None,
            corpora=[road.place(source)] if source == "tokenize" else [],
            target=road.target,
            settings=road.recipe.train,
            capture=road.recipe.capture,
            is_capture_asked=True,
            device=pick_device(road.device),
            progress=road.progress,
        )


def torchrun_command(road: Road) -> list[str]:
    """Trains with as many processes as the recipe says; what they show goes to the terminal."""
    (source,) = source_of_training(road)
    words = ["--nproc-per-node", str(road.recipe.run.processes), "-m", "fledge", "train"]
    words += ["--features" if source == "capture" else "--corpus", str(road.place(source))]
    words += ["--out", str(road.place("train")), "--target", road.target]
    words += ["--device", road.device, "--recipe", str(road.recipe_path)]
    words += [word for one in road.assignments for word in ("--set", one)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]


def _train_in_processes(road: Road) -> None:
    command = torchrun_command(road)
    road.progress.note(f"training in {road.recipe.run.processes} processes: {' '.join(command)}")
    # Its stdout names the directory only, and ours is for our own result.
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        raise TrainingError(
            f"training in {road.recipe.run.processes} processes ended with exit code {code}; what "
            "they said is above."
        )
