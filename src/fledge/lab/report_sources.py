"""Result directories that a report is about, read by what their manifests say they are.

Unfinished ones are read as well: what a broken run measured is worth a page too. docs/report.md
says what each kind must hold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.store.local_directory import require_directory
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import (
    BENCH,
    HEAD,
    MANIFEST_NAME,
    SCORECARD,
    TUNING,
    read_manifest,
)
from fledge.store.stage_directory import PLAN_NAME, read_plan

DOCUMENTS = {SCORECARD: "scorecard.json", TUNING: "tune.json", BENCH: "bench.json"}
"""The file that holds the result, by kind; a run of training has curves instead."""

CURVES_NAME = "curves.jsonl"
KINDS = {SCORECARD: "selection", TUNING: "tuning", BENCH: "bench", HEAD: "training"}
"""What people call them, in the order of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One directory."""

    name: str
    """Different from all others on the page."""

    path: Path
    kind: str
    document: Mapping[str, Any]
    """What the stage found; the curves of a run under `curves`."""

    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]
    is_complete: bool

    @property
    def target(self) -> str:
        arms = self.document.get("arms") or [{}]
        known = (
            self.document.get("target"),
            self.identity.get("target"),
            arms[0].get("target") or arms[0].get("model"),
        )
        return next((_target_name(one) for one in known if one), "unknown")


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """All directories, in the order of the page; their last names tell them apart."""
    if not paths:
        raise ConfigError("there is nothing to report on; name at least one directory.")
    resolved = [path.expanduser().resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise ConfigError(f"{twice} is named twice; name it once.")
    names = _names(resolved)
    sources = [_read(path, name) for path, name in zip(resolved, names, strict=True)]
    order = list(KINDS)
    return sorted(sources, key=lambda source: order.index(source.kind))


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, and as many before it as tell it from the others."""
    return [_name(path, [other for other in paths if other != path]) for path in paths]


def _name(path: Path, others: Sequence[Path]) -> str:
    for depth in range(1, len(path.parts)):
        if all(other.parts[-depth:] != path.parts[-depth:] for other in others):
            return "/".join(path.parts[-depth:])
    return str(path)


def _read(path: Path, name: str) -> Source:
    require_directory(path)
    is_complete = (path / MANIFEST_NAME).exists()
    if is_complete:
        manifest = read_manifest(path)
        kind, identity = manifest.plan.kind, manifest.plan.identity
        provenance = manifest.provenance
    elif (path / PLAN_NAME).exists():
        plan = read_plan(LocalPlace(path))
        kind, identity, provenance = plan["kind"], plan["identity"], {}
    else:
        raise ArtifactError(
            f"{path} was not made by fledge: it has neither {MANIFEST_NAME} nor {PLAN_NAME}. Give "
            "directories of select, tune, bench or train."
        )
    if kind not in KINDS:
        raise ArtifactError(
            f"{path} holds {kind}, which a report says nothing about; give directories of select, "
            "tune, bench or train."
        )
    document: dict[str, Any] = (
        {"curves": _read_curves(path)} if kind == HEAD else _read_document(path, kind)
    )
    return Source(
        name=name,
        path=path,
        kind=kind,
        document=document,
        identity=identity,
        provenance=provenance or document.get("provenance", {}),
        is_complete=is_complete,
    )


def _read_document(path: Path, kind: str) -> dict[str, Any]:
    file = path / DOCUMENTS[kind]
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path} has no {file.name} yet: nothing was measured. Run the command that makes it."
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{file} is damaged: {error}.") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{file} is damaged: it is not a table.")
    return document


def _read_curves(path: Path) -> list[dict[str, Any]]:
    """The lines that training wrote; one that a kill cut short is left out."""
    file = path / CURVES_NAME
    content = file.read_bytes() if file.exists() else b""
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ArtifactError(f"{file} is damaged: {error}.") from error


def _target_name(target: Any) -> str:
    """A name as it was typed, without the directories of somebody's machine."""
    text = str(target.get("name") or target) if isinstance(target, Mapping) else str(target)
    return Path(text).name if text.startswith(("/", "~", ".")) else text
