"""The stage behind `fledge train`: features, or corpora and their target, in; a head out.

The directory of a run is a head as it stands once the run is over: the best checkpoint's, by accept
length on held-out prompts, without MLP units that training has left idle. On the way it holds

    plan.json, curves.jsonl, plots    what was asked for, and how it went
    checkpoints/step-00000400/        heads that load as they are, the newest with their state
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.train_settings import TrainSettings
from fledge.features.feature_store import FeatureStore
from fledge.models.head_files import load_head, write_head_files
from fledge.models.idle_units import without_idle_units
from fledge.models.target import Target
from fledge.store.cache_publish import flush
from fledge.store.capacity import translated_disk_errors
from fledge.store.corpus import Corpora
from fledge.store.manifest import Manifest, Plan, read_manifest
from fledge.store.stage_directory import StageDirectory, open_stage
from fledge.training.assembly import assemble, load_target, make_order
from fledge.training.checkpoint import (
    Record,
    best_checkpoint,
    list_checkpoints,
    load_newest,
)
from fledge.training.curves import CurveLog, read_curves
from fledge.training.distributed import Processes
from fledge.training.metrics import Figure
from fledge.training.reporting import Reporter
from fledge.training.step_memory import short_memory
from fledge.training.train_input import TrainInput
from fledge.training.trainer import Parts, Trainer, Watch

HEAD_FILES = ("config.json", "model.safetensors")
_TIMES = ("tokens_per_s", "data_wait_share")


def train(
    given: TrainInput,
    settings: TrainSettings,
    out: Path,
    *,
    processes: Processes | None = None,
    progress: Progress | None = None,
    target: Target | None = None,
    watch: Watch | None = None,
    has_plots: bool = True,
) -> Manifest:
    """Train a head; goes on where an earlier run of the same settings stopped.

    `target` is one that is loaded already; `watch` may end the run at a measurement.
    """
    ours = processes or Processes(device=given.device)
    shown = progress or SilentProgress()
    with _opened(out, given.plan(settings), ours) as stage:
        is_finished = ours.gather(stage is not None and stage.is_finished)[0]
        if not is_finished:
            if stage is not None and isinstance(given.inside, Corpora):
                given.inside.verify(shown)
            # Not held here: training from features may let go of most of the target.
            parts = assemble(
                given, settings, target or load_target(given, settings, shown), ours, shown
            )
            _note_silence(parts, settings, shown)
            with translated_disk_errors(out, place="output"):
                _run(parts, settings, out, ours, shown, watch=watch, has_plots=has_plots)
                if stage is not None:
                    _finish(given, settings, parts, stage, shown)
        ours.wait()
    return read_manifest(out)


def _note_silence(parts: Parts, settings: TrainSettings, progress: Progress) -> None:
    is_wanted = settings.held_out.decode_prompts > 0
    if is_wanted and parts.measurer is not None and not parts.measurer.has_prompts:
        progress.note(
            "no held-out sample has a prompt that leaves room for an answer: accept length is not "
            "measured, and the best checkpoint is the one with the highest ideal speed-up."
        )


@contextmanager
def _opened(out: Path, plan: Plan, processes: Processes) -> Iterator[StageDirectory | None]:
    """The stage in the first process, which alone writes; None in the others."""
    if not processes.is_first:
        yield None
        return
    with open_stage(out, plan, has_results=lambda path: bool(list_checkpoints(path))) as stage:
        yield stage


def _run(
    parts: Parts,
    settings: TrainSettings,
    out: Path,
    processes: Processes,
    progress: Progress,
    *,
    watch: Watch | None,
    has_plots: bool,
) -> None:
    # The first process removes what is damaged, before the others look.
    state = load_newest(out, progress) if processes.is_first else None
    processes.wait()
    state = state if processes.is_first else load_newest(out, progress)
    require_one_start(out, processes.gather(state.step if state else 0))
    curves = reporter = None
    if processes.is_first:
        curves = CurveLog(out, progress=progress)
        curves.truncate_after(state.step if state else 0)
        reporter = Reporter(curves, parts.order, settings, out, progress, has_plots=has_plots)
    try:
        trainer = Trainer(
            parts,
            settings,
            out,
            processes=processes,
            progress=progress,
            reporter=reporter,
            watch=watch,
        )
        forgetting = short_memory(settings.optimizer, trainer.num_steps)
        if forgetting is not None:
            progress.note(forgetting)
        if state is not None:
            progress.note(f"{state.step:,} of {trainer.num_steps:,} steps were taken before.")
            trainer.restore(state)
        trainer.run()
        if reporter is not None:
            reporter.draw(is_last=True)
    finally:
        if curves is not None:
            curves.close()


def require_one_start(out: Path, steps: Sequence[int]) -> None:
    """Refuse processes that would go on from different steps, given in the order of ranks."""
    if len(set(steps)) > 1:
        rank = next(rank for rank, step in enumerate(steps) if step != steps[0])
        raise ArtifactError(
            f"process 0 goes on from step {steps[0]} of {out}, and process {rank} finds step "
            f"{steps[rank]} there; all machines of a run need the same output directory."
        )


def _finish(
    given: TrainInput,
    settings: TrainSettings,
    parts: Parts,
    stage: StageDirectory,
    progress: Progress,
) -> None:
    records = list_checkpoints(stage.path)
    best = best_checkpoint(records)
    assert best is not None, "a run ends with a checkpoint"
    counts = summarise(given, settings, parts, records, best)
    with _slim_files(best.directory, progress) as (directory, width):
        counts["mlp_width"] = width
        for name in HEAD_FILES:
            _copy(directory / name, stage.path / name)
    stage.finish(
        counts=counts,
        files=[stage.path / name for name in HEAD_FILES],
        device=describe_device(given.device),
        progress=progress,
    )


@contextmanager
def _slim_files(directory: Path, progress: Progress) -> Iterator[tuple[Path, int]]:
    """Where a head's files are without idle units, and how wide its MLP is there."""
    head = load_head(directory)
    slim = without_idle_units(head)
    trained, width = (one.config.intermediate_size for one in (head, slim))
    if width == trained:
        yield directory, width
        return
    progress.note(
        f"{trained - width:,} of {trained:,} units of the MLP do nothing and are left out; the "
        "checkpoints keep them."
    )
    with tempfile.TemporaryDirectory() as folder:
        write_head_files(slim, Path(folder))
        yield Path(folder), width


def summarise(
    given: TrainInput, settings: TrainSettings, parts: Parts, records: list[Record], best: Record
) -> dict[str, Any]:
    """What a finished run amounts to; nothing that a clock says."""
    division, _ = make_order(given, settings)
    return {
        "mode": "features" if isinstance(given.inside, FeatureStore) else "online",
        "samples": len(division.trained),
        "samples_held_out": len(division.held_out),
        "steps": records[-1].step,
        "planned_steps": parts.order.num_steps,
        "tokens": records[-1].tokens,
        "weights": sum(weight.numel() for weight in parts.exhibit.parameters()),
        "best_step": best.step,
        "best": dict(best.measures),
        "last": dict(records[-1].measures),
    }


def measure_speed(out: Path) -> dict[str, float | None]:
    """Tokens per second of the median step, and the share of all time that waited for data."""
    speeds, waits, times = [], 0.0, 0.0
    for record in read_curves(out):
        if record.kind == "train":
            speed, wait = (_number(record.timing[name]) for name in _TIMES)
            elapsed = _number(record.figures["tokens"]) / speed
            speeds.append(speed)
            waits += wait * elapsed
            times += elapsed
    if not speeds:
        return dict.fromkeys(_TIMES)
    return dict(zip(_TIMES, (statistics.median(speeds), waits / times), strict=True))


def _number(figure: Figure) -> float:
    assert isinstance(figure, int | float), "curves of training hold numbers here"
    return float(figure)


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _copy(source: Path, destination: Path) -> None:
    """Copy a file so that it is there whole or not at all."""
    temporary = destination.with_name(f".{destination.name}.tmp")
    shutil.copyfile(source, temporary)
    flush(temporary)
    temporary.replace(destination)
    flush(destination.parent)
