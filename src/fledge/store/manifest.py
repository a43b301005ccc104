"""What a finished directory says about itself; `manifest.json` is written last, by rename.

The fingerprint covers what the directory holds and how it came to be, but neither when nor where:
the same work done twice has the same fingerprint.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.store.cache_publish import flush

MANIFEST_NAME = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a stage is about to make; two runs with equal plans may share a directory."""

    kind: str
    """`conversations`, `answers`, `corpus`, ..."""

    settings: Mapping[str, Any]
    parents: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the directories that are read, by what they are to this stage."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """Target, tokenizer, layers, dtype: whatever a later stage must agree with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A finished directory."""

    plan: Plan
    counts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    """Bytes and sha256 of each file, by its path below the directory."""

    provenance: Mapping[str, Any]
    """Version, commit, date, machine: outside the fingerprint."""

    schema: int = SCHEMA

    @property
    def fingerprint(self) -> str:
        hashed = {key: value for key, value in self._to_json().items() if key != "provenance"}
        # Through JSON once before sorting: numbers as keys become texts, which sort differently.
        plain = json.loads(json.dumps(hashed))
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(encode_json(text)).hexdigest()

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST_NAME, {**self._to_json(), "fingerprint": self.fingerprint})

    def _to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "plan": asdict(self.plan),
            "counts": dict(self.counts),
            "files": dict(self.files),
            "provenance": dict(self.provenance),
        }


def read_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """The manifest of a finished directory, which must be of the given kind."""
    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise ArtifactError(f"there is no directory {directory}.")
    if not path.is_file():
        raise ArtifactError(
            f"{directory} has no {MANIFEST_NAME}: it is unfinished, or not made by fledge. Run the "
            "stage that makes it again; it goes on where it stopped."
        )
    try:
        table = json.loads(path.read_bytes())
        schema = table["schema"]
        if schema != SCHEMA:
            raise MismatchError(
                f"{directory} has layout {schema} and this fledge reads {SCHEMA}; make it again, "
                "or use the fledge that made it."
            )
        manifest = Manifest(
            plan=Plan(**table["plan"]),
            counts=table["counts"],
            files=table["files"],
            provenance=table["provenance"],
        )
        is_whole = table["fingerprint"] == manifest.fingerprint
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({error!r}); make {directory} again.") from error
    if not is_whole:
        raise ArtifactError(f"{path} was changed by hand; make {directory} again.")
    if kind is not None and manifest.plan.kind != kind:
        raise MismatchError(f"{directory} holds {manifest.plan.kind}; this stage reads {kind}.")
    return manifest


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    temporary.write_bytes(encode_json(text))
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def encode_json(text: str) -> bytes:
    """JSON text as UTF-8; half of a surrogate pair, which UTF-8 lacks, as JSON's own escape."""
    return text.encode("utf-8", errors="backslashreplace")
