"""The engine in this process as a side of a comparison."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.progress import Progress
from fledge.engine.engine import Engine
from fledge.engine.timing import measure_pass_times
from fledge.lab.bench_arms import EngineChoice, with_and_without
from fledge.lab.load_driver import Arm, Driver
from fledge.lab.load_engine import EngineDriver
from fledge.models.checked_target import load_checked_target
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target


class EngineArm:
    """The engine in this process; arms share the target's weights."""

    is_quick_to_open = False

    def __init__(
        self, name: str, choice: EngineChoice, settings: BenchSettings, target: "SharedTarget"
    ) -> None:
        self.name, self._choice, self._settings = name, choice, settings
        self._target = target

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"server": "none", **self._choice.identity}

    @contextmanager
    def opened(self, progress: Progress) -> Iterator[Driver]:
        choice = self._choice
        # Read first: it is small, and a wrong path should not cost a target's loading.
        head = None if choice.head is None else load_head(choice.head)
        target = self._target.load(choice, progress)
        times = None
        if head is not None:
            head = fit_to_target(head, target)
            if choice.engine.controller == "adaptive":
                with progress.task("timing passes", unit=""):
                    times = measure_pass_times(target, head, choice.engine, name=choice.target)
        engine = Engine(target, head, choice.engine, times=times)
        engine.capture_ahead(progress)
        try:
            yield EngineDriver(engine, self._settings)
        finally:
            del engine
            # The next engine takes what memory is free then.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class SharedTarget:
    """A target that is loaded when the first arm needs it."""

    def __init__(self) -> None:
        self._target: Target | None = None

    def load(self, choice: EngineChoice, progress: Progress) -> Target:
        if self._target is None:
            device = pick_device(choice.device)
            resolved = resolve_target(choice.target, progress=progress)
            self._target = load_checked_target(
                choice.target,
                resolved.directory,
                origin=resolved.origin,
                dtype=pick_dtype(choice.dtype, device),
                device=device,
                progress=progress,
            )
        return self._target


def engine_arms(choice: EngineChoice, settings: BenchSettings) -> list[Arm]:
    """The target without its head, and, where there is one, with it."""
    target = SharedTarget()
    return [
        EngineArm(name, one, settings, target) for name, one in with_and_without(choice).items()
    ]


def check_head(directory: Path | None) -> None:
    """Refuse what is no head before anything is started."""
    if directory is not None:
        load_head(directory)


def device_name(typed: str) -> str:
    """What the engine runs on, in words."""
    device = pick_device(typed)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
