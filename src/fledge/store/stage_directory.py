"""The output directory of a stage: one writer, resumable, finished when its manifest is there.

    with open_stage(out, plan) as stage:
        if not stage.is_finished:
            ...write files below stage.path, going on from what is there...
            stage.finish(counts=..., files=[...])
        return stage.manifest

`plan.json` is written first, so that a resumed run can be refused when it asks for something else.
Where nothing was made yet there is nothing to protect, and a run that stopped at a bad row may go
on without such rows: nothing was left out so far.
"""

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fledge.contracts import provenance
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.store.capacity import translated_disk_errors
from fledge.store.hashing import hash_part
from fledge.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    Plan,
    read_manifest,
    require_files,
    write_json,
)

PLAN_NAME = "plan.json"
LOCK_NAME = ".lock"


class StageDirectory:
    """A directory that this process alone may write."""

    def __init__(self, path: Path, plan: Plan, manifest: Manifest | None) -> None:
        self.path = path
        self.plan = plan
        self._manifest = manifest

    @property
    def is_finished(self) -> bool:
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "the stage has not finished"
        return self._manifest

    def finish(
        self,
        *,
        counts: Mapping[str, Any],
        files: Iterable[Path],
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Manifest:
        """Write the manifest: from now on the directory is whole and stays as it is."""
        sizes = {path: path.stat().st_size for path in sorted(files)}
        shown = progress or SilentProgress()
        with shown.task(f"checking {self.path.name}", sum(sizes.values())) as task:
            entries = {
                str(path.relative_to(self.path)): {"bytes": size, "sha256": hash_part(path, task)}
                for path, size in sizes.items()
            }
        self._manifest = Manifest(
            plan=self.plan,
            counts=counts,
            files=entries,
            provenance=provenance.collect(device=device),
        )
        self._manifest.write(self.path)
        return self._manifest


@contextmanager
def open_stage(
    path: Path, plan: Plan, *, has_results: Callable[[Path], bool] = lambda path: True
) -> Iterator[StageDirectory]:
    """Make or reopen the output directory of a stage, and keep other writers out meanwhile.

    `has_results` says of an unfinished directory whether there is anything in it to go on with.
    """
    with _locked(path):
        with translated_disk_errors(path, place="output"):
            manifest = _check(path, plan, has_results)
        yield StageDirectory(path, plan, manifest)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with translated_disk_errors(path, place="output"):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_NAME).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(
                f"another fledge process is writing {path}; wait for it, or choose another "
                "directory."
            ) from error
        yield


def _check(path: Path, plan: Plan, has_results: Callable[[Path], bool]) -> Manifest | None:
    """The manifest if the stage finished before; refuses a directory of other work."""
    asked = json.loads(json.dumps(asdict(plan)))
    if (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path)
        _refuse_other(path, "finished", json.loads(json.dumps(asdict(manifest.plan))), asked)
        require_files(path, manifest)
        return manifest
    if (path / PLAN_NAME).exists():
        found = _read_plan(path)
        if found["kind"] != asked["kind"] or has_results(path):
            _refuse_other(path, "unfinished", _going_on(found, asked), asked)
        if found != asked:
            write_json(path / PLAN_NAME, asked)
        return None
    ours = {LOCK_NAME, f".{PLAN_NAME}.tmp"}
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if strangers:
        raise ConfigError(
            f"{path} is not empty and was not made by fledge (it holds {strangers[0]}); choose an "
            "empty or a new directory."
        )
    write_json(path / PLAN_NAME, asked)
    return None


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / PLAN_NAME).read_bytes())
        Plan(**found)
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"{path / PLAN_NAME} is damaged; remove {path} and start again."
        ) from error
    return dict(found)


def _going_on(found: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A plan that went well so far, with the new one's word on bad rows where it was `stop`."""
    settings = {
        name: asked["settings"].get(name) if name.startswith("on_") and value == "stop" else value
        for name, value in found["settings"].items()
    }
    return {**found, "settings": settings}


def _refuse_other(path: Path, state: str, found: Any, asked: Any) -> None:
    difference = first_difference(found, asked)
    if difference is not None:
        name, there, wanted = difference
        raise MismatchError(
            f"{path} holds {state} work with {name} = {_shown(there)}, and this run has {name} = "
            f"{_shown(wanted)}; choose another directory, or remove this one."
        )


def first_difference(found: Any, asked: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two plain documents differ: its name and both values."""
    if isinstance(found, dict) and isinstance(asked, dict):
        keys = [*found, *(key for key in asked if key not in found)]
        pairs = [(f"{name}.{key}" if name else key, found.get(key), asked.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(asked, list) and len(found) == len(asked):
        pairs = [
            (f"{name}[{i}]", one, other)
            for i, (one, other) in enumerate(zip(found, asked, strict=True))
        ]
    else:
        return None if found == asked else (name, found, asked)
    differences = (first_difference(one, other, below) for below, one, other in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _shown(value: Any, width: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
