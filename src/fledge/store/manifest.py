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

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.store.cache_publish import publish_file
from fledge.store.local_directory import require_directory
from fledge.store.local_place import LocalPlace
from fledge.store.place import Place

MANIFEST_NAME = "manifest.json"
SCHEMA = 1

CONVERSATIONS, ANSWERS, CORPUS = "conversations", "answers", "corpus"
FEATURES, HEAD, SWEEP = "features", "head", "sweep"
BENCH, TUNING = "bench", "tuning"
SCORECARD, EXPORTS = "scorecard", "exports"
"""What directories hold."""

_MADE_BY = {
    CONVERSATIONS: "prepare",
    ANSWERS: "regenerate",
    CORPUS: "tokenize",
    FEATURES: "capture",
    HEAD: "train",
    SWEEP: "sweep",
    SCORECARD: "select",
    BENCH: "bench",
    TUNING: "tune",
    EXPORTS: "run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a stage is about to make; two runs with equal plans may share a directory."""

    kind: str
    """What the directory will hold: `conversations`, `answers`, `corpus`, `features`, `head`."""

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
    """Bytes and sha256 of each file, by its path below the directory. Of a shard of features the
    sha256 is that of its head, which holds checksums of the rest."""

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

    def write(self, directory: Path | Place) -> None:
        document = {**self._to_json(), "fingerprint": self.fingerprint}
        _place(directory).replace(MANIFEST_NAME, json_document(document))

    def _to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "plan": asdict(self.plan),
            "counts": dict(self.counts),
            "files": dict(self.files),
            "provenance": dict(self.provenance),
        }


def read_input(directory: Path | Place, *kinds: str) -> Manifest:
    """The manifest of a directory that is to be read: of one of the kinds, its files all there."""
    remedy = f"give a directory that `fledge {_MADE_BY[kinds[0]]}` made."
    place = _place(directory)
    if isinstance(place, LocalPlace) and place.path.is_file():
        raise ConfigError(f"{directory} is a file; {remedy}")
    manifest = read_manifest(directory)
    kind = manifest.plan.kind
    if kind not in kinds:
        raise MismatchError(f"{directory} holds {kind}, not {kinds[0]}; {remedy}")
    require_files(place, manifest)
    return manifest


def require_files(place: Place, manifest: Manifest) -> None:
    """Refuse a finished directory that has lost a file, or a part of one."""
    sizes = place.sizes()
    for name, entry in manifest.files.items():
        found = sizes.get(name)
        if found != entry["bytes"]:
            state = "missing" if found is None else f"{found} bytes long"
            raise ArtifactError(
                f"{place.file(name)} is {state}, and the manifest says {entry['bytes']} bytes; "
                f"remove {place} and make it again."
            )


def read_manifest(directory: Path | Place) -> Manifest:
    """The manifest of a finished directory."""
    place = _place(directory)
    if isinstance(place, LocalPlace):
        require_directory(place.path)
    content = place.read(MANIFEST_NAME)
    if content is None:
        raise ArtifactError(
            f"{directory} has no {MANIFEST_NAME}: it is unfinished, or not made by fledge. Run the "
            "stage that makes it again; it goes on where it stopped."
        )
    file = place.file(MANIFEST_NAME)
    try:
        table = json.loads(content)
        schema = table["schema"]
        if schema != SCHEMA:
            raise MismatchError(
                f"{directory} has layout {schema} and this fledge reads {SCHEMA}; remove it and "
                "make it again, or use the fledge that made it."
            )
        manifest = Manifest(
            plan=Plan(**table["plan"]),
            counts=table["counts"],
            files=table["files"],
            provenance=table["provenance"],
        )
        is_whole = table["fingerprint"] == manifest.fingerprint
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{file} is damaged ({error!r}); remove {directory} and make it again."
        ) from error
    if not is_whole:
        raise ArtifactError(f"{file} was changed by hand; remove {directory} and make it again.")
    return manifest


def _place(directory: Path | Place) -> Place:
    return LocalPlace(directory) if isinstance(directory, Path) else directory


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file that appears whole or not at all."""
    publish_file(path, json_document(document))


def json_document(document: Any) -> bytes:
    """A JSON file's content, for people as well."""
    return encode_json(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def encode_json(text: str) -> bytes:
    """JSON text as UTF-8; half of a surrogate pair, which UTF-8 lacks, as JSON's own escape."""
    return text.encode("utf-8", errors="backslashreplace")
