"""The output directory of a stage: one writer, resumable, finished when its manifest is there.

    with open_stage(out, plan) as stage:
        if not stage.is_finished:
            ...write files below stage.path, going on from what is there...
            stage.finish(counts=..., files=[...])
        return stage.manifest

`plan.json` is written first, so that a resumed run can be refused when it asks for something else.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fledge.contracts import provenance
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.store.hashing import hash_file
from fledge.store.manifest import MANIFEST_NAME, Manifest, Plan, read_manifest, write_json

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
        self, *, counts: Mapping[str, Any], files: Iterable[Path], device: str = "cpu"
    ) -> Manifest:
        """Write the manifest: from now on the directory is whole and stays as it is."""
        entries = {
            str(path.relative_to(self.path)): {
                "bytes": path.stat().st_size,
                "sha256": hash_file(path, SilentProgress()),
            }
            for path in sorted(files)
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
def open_stage(path: Path, plan: Plan) -> Iterator[StageDirectory]:
    """Make or reopen the output directory of a stage, and keep other writers out meanwhile."""
    _make(path)
    with (path / LOCK_NAME).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(
                f"another fledge process is writing {path}; wait for it, or choose another "
                "directory."
            ) from error
        yield StageDirectory(path, plan, _check(path, plan))


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used as a directory: {error.strerror}.") from error


def _check(path: Path, plan: Plan) -> Manifest | None:
    """The manifest if the stage finished before; refuses a directory of other work."""
    asked = json.loads(json.dumps(asdict(plan)))
    if (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path)
        _refuse_other(path, "finished", json.loads(json.dumps(asdict(manifest.plan))), asked)
        return manifest
    if (path / PLAN_NAME).exists():
        try:
            found = json.loads((path / PLAN_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{path / PLAN_NAME} is damaged; remove {path} and start again."
            ) from error
        _refuse_other(path, "unfinished", found, asked)
        return None
    strangers = [entry.name for entry in path.iterdir() if entry.name != LOCK_NAME]
    if [name for name in strangers if name != f".{PLAN_NAME}.tmp"]:
        raise ConfigError(
            f"{path} is not empty and was not made by fledge (it holds {sorted(strangers)[0]}); "
            "choose an empty or a new directory."
        )
    write_json(path / PLAN_NAME, asked)
    return None


def _refuse_other(path: Path, state: str, found: Any, asked: Any) -> None:
    difference = first_difference(found, asked)
    if difference is not None:
        name, there, wanted = difference
        raise MismatchError(
            f"{path} holds {state} work with {name} = {there!r}, and this run has {name} = "
            f"{wanted!r}; choose another directory, or remove this one."
        )


def first_difference(found: Any, asked: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two plain documents differ: its name and both values."""
    if isinstance(found, dict) and isinstance(asked, dict):
        for key in [*found, *(key for key in asked if key not in found)]:
            below = f"{name}.{key}" if name else key
            difference = first_difference(found.get(key), asked.get(key), below)
            if difference is not None:
                return difference
        return None
    return None if found == asked else (name, found, asked)
