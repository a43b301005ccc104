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

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fledge.contracts import provenance
from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.store.hashing import hash_part
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    Plan,
    json_document,
    read_manifest,
    require_files,
)
from fledge.store.place import LOCK_NAME, Place

PLAN_NAME = "plan.json"


class StageDirectory:
    """A directory that this process alone may write."""

    def __init__(self, place: Place, plan: Plan, manifest: Manifest | None) -> None:
        self.place = place
        self.plan = plan
        self._manifest = manifest

    @property
    def path(self) -> Path:
        assert isinstance(self.place, LocalPlace), "the stage writes to an object store"
        return self.place.path

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
        """Read every file once, and write the manifest."""
        sizes = {path: path.stat().st_size for path in sorted(files)}
        shown = progress or SilentProgress()
        with shown.task(f"checking {self.path.name}", sum(sizes.values())) as task:
            entries = {
                str(path.relative_to(self.path)): {"bytes": size, "sha256": hash_part(path, task)}
                for path, size in sizes.items()
            }
        return self.seal(counts=counts, files=entries, device=device)

    def seal(
        self, *, counts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], device: str
    ) -> Manifest:
        """Write the manifest: from now on the directory is whole and stays as it is."""
        self._manifest = Manifest(
            plan=self.plan,
            counts=counts,
            files=files,
            provenance=provenance.collect(device=device),
        )
        self._manifest.write(self.place)
        return self._manifest


@contextmanager
def open_stage(
    path: Path, plan: Plan, *, has_results: Callable[[Path], bool] = lambda path: True
) -> Iterator[StageDirectory]:
    """Make or reopen the output directory of a stage, and keep other writers out meanwhile.

    `has_results` says of an unfinished directory whether there is anything in it to go on with.
    """
    with open_stage_at(LocalPlace(path), plan, has_results=lambda place: has_results(path)) as it:
        yield it


@contextmanager
def open_stage_at(
    place: Place, plan: Plan, *, has_results: Callable[[Place], bool] = lambda place: True
) -> Iterator[StageDirectory]:
    """The same for an output directory that may be in an object store."""
    with place.locked():
        manifest = _check(place, plan, has_results)
        yield StageDirectory(place, plan, manifest)


def _check(place: Place, plan: Plan, has_results: Callable[[Place], bool]) -> Manifest | None:
    """The manifest if the stage finished before; refuses a directory of other work."""
    asked = json.loads(json.dumps(asdict(plan)))
    names = place.names()
    if MANIFEST_NAME in names:
        manifest = read_manifest(place)
        _refuse_other(place, "finished", json.loads(json.dumps(asdict(manifest.plan))), asked)
        require_files(place, manifest)
        return manifest
    if PLAN_NAME in names:
        found = read_plan(place)
        if found["kind"] != asked["kind"] or has_results(place):
            _refuse_other(place, "unfinished", _going_on(found, asked), asked)
        if found != asked:
            place.replace(PLAN_NAME, json_document(asked))
        return None
    ours = {LOCK_NAME, f".{PLAN_NAME}.tmp"}
    strangers = sorted(name for name in names if name not in ours)
    if strangers:
        raise ConfigError(
            f"{place} is not empty and was not made by fledge (it holds {strangers[0]}); choose an "
            "empty or a new directory."
        )
    place.replace(PLAN_NAME, json_document(asked))
    return None


def read_plan(place: Place) -> dict[str, Any]:
    """The plan of an unfinished directory, as JSON has it."""
    try:
        found = json.loads(place.read(PLAN_NAME) or b"")
        Plan(**found)
    except (ValueError, TypeError) as error:
        raise ArtifactError(
            f"{place.file(PLAN_NAME)} is damaged; remove {place} and start again."
        ) from error
    return dict(found)


def _going_on(found: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A plan that went well so far, with the new one's word on bad rows where it was `stop`."""
    settings = {
        name: asked["settings"].get(name) if name.startswith("on_") and value == "stop" else value
        for name, value in found["settings"].items()
    }
    return {**found, "settings": settings}


def _refuse_other(place: Place, state: str, found: Any, asked: Any) -> None:
    difference = first_difference(_telling_first(found), _telling_first(asked))
    if difference is not None:
        name, there, wanted = difference
        raise MismatchError(
            f"{place} holds {state} work with {name} = {_shown(there)}, and this run has {name} = "
            f"{_shown(wanted)}; choose another directory, or remove this one."
        )


def _telling_first(plan: dict[str, Any]) -> dict[str, Any]:
    """Another target says more than the fingerprint of the input that was made for it."""
    return {**{name: plan[name] for name in plan if name != "parents"}, "parents": plan["parents"]}


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
