"""Heads that come with fledge: one directory for each, named like the built-in target it is for.

Beside the head lie its manifest, its model card, and what tuning found best, by kind of device. A
head belongs to one set of weights: a target is told by the checksum of the file it is made of, or,
given as a directory, by a look at its weights. Every other target goes without a head.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, FledgeError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.settings import DEFAULT_HEAD, EngineSettings
from fledge.contracts.tuned_settings import TunedSettings, obey, read_tuned
from fledge.models.weights_identity import weights_identity
from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.catalogue import CATALOGUE, Alias
from fledge.store.hashing import hash_file_once
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import MANIFEST_NAME, Manifest, read_manifest, require_files

SHIPPED_HEADS = Path(__file__).parents[1] / "heads"
DEVICE_KINDS = ("cpu", "cuda")
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHead:
    """A head of the package."""

    target: str
    """The built-in name of its target."""

    directory: Path
    manifest: Manifest

    @property
    def stored_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.manifest.files.values())

    def tuned(self, device_kind: str) -> TunedSettings | None:
        """What tuning found best on such a device, where it was done there."""
        file = self.directory / tuning_file(device_kind)
        return read_tuned(file) if file.is_file() else None

    @property
    def tuned_kinds(self) -> tuple[str, ...]:
        """Kinds of device that it was tuned on."""
        return tuple(kind for kind in DEVICE_KINDS if tuning_file(kind) in self.manifest.files)

    def is_for_file(self, sha256: str) -> bool:
        """Whether the target is made of this file."""
        return bool(self.manifest.plan.identity.get("payload") == sha256)

    def is_for_directory(self, directory: Path) -> bool:
        """Whether the target in a directory has the weights that the head was trained for."""
        # Sizes first: a look at each file of a large target takes a while.
        found, own = _read_config(directory), _read_config(self.directory)
        sizes = (found.get("vocab_size"), found.get("hidden_size"))
        if sizes != (own.get("vocab_size"), own.get("target_hidden_size")):
            return False
        return weights_identity(directory) == self.manifest.plan.identity.get("weights")


def tuning_file(device_kind: str) -> str:
    """Name of the file with the settings for a kind of device."""
    return f"tune-{device_kind}.json"


def list_shipped_heads(root: Path | None = None) -> list[ShippedHead]:
    """All heads of the package, each with its files there."""
    place = root or SHIPPED_HEADS
    directories = sorted(place.iterdir()) if place.is_dir() else []
    return [_read(one) for one in directories if (one / _CONFIG).is_file()]


def find_shipped_head(
    target: str,
    *,
    progress: Progress | None = None,
    root: Path | None = None,
    catalogue: Mapping[str, Alias] = CATALOGUE,
) -> ShippedHead | None:
    """The head that comes with fledge for what stands after `--target`; None where there is none.

    The target need not have been fetched yet.
    """
    heads = list_shipped_heads(root)
    if not heads:
        return None
    path, alias = Path(target).expanduser(), catalogue.get(target.strip().lower())
    if path.is_dir() and not (alias and not (path / _CONFIG).exists()):
        return next((head for head in heads if head.is_for_directory(path)), None)
    if path.is_file():
        return _of_file(path, heads, catalogue, progress or SilentProgress())
    if alias is None:
        return None
    return next(
        (one for one in heads if one.target == alias.name and one.is_for_file(alias.sha256)), None
    )


def choose_head(
    head: str | Path | None,
    target: str,
    settings: EngineSettings | None,
    *,
    device_kind: str,
    progress: Progress | None = None,
) -> tuple[Path | None, EngineSettings]:
    """A head's directory and the engine's settings; `default` takes what comes with fledge."""
    settings = settings or EngineSettings()
    if head is None:
        return None, settings
    if head != DEFAULT_HEAD:
        return Path(head), settings
    found = find_shipped_head(target, progress=progress)
    if found is None:
        return None, settings
    return found.directory, obey(found.tuned(device_kind), settings)


def describe_drafting(head: Path | None, settings: EngineSettings) -> str:
    """`head: shipped for smollm2-135m-instruct; trees of depth 6, width 8, 40 nodes, adaptive`"""
    if head is None:
        return "head: none, one token at a time"
    name = f"shipped for {head.name}" if head.parent == SHIPPED_HEADS else str(head)
    tree = settings.tree
    shape = f"trees of depth {tree.depth}, width {tree.width}, {tree.num_nodes} nodes"
    if tree.width == 1:
        shape = f"chains of {min(tree.depth, tree.budget)}"
    return f"head: {name}; {shape}, {settings.controller}"


def _of_file(
    path: Path, heads: list[ShippedHead], catalogue: Mapping[str, Alias], progress: Progress
) -> ShippedHead | None:
    sizes = {alias.payload_bytes for alias in catalogue.values()}
    # No other file needs to be read for this.
    if path.stat().st_size not in sizes:
        return None
    sha256 = hash_file_once(path, CacheLayout(default_cache_dir()).hashes, progress)
    return next((head for head in heads if head.is_for_file(sha256)), None)


def _read(directory: Path) -> ShippedHead:
    try:
        manifest = read_manifest(directory)
        require_files(LocalPlace(directory), manifest)
    except FledgeError as error:
        raise ArtifactError(
            f"the head for {directory.name} that comes with fledge is damaged "
            f"({MANIFEST_NAME}: {error}) Install fledge again, or do without: --head none."
        ) from error
    return ShippedHead(target=directory.name, directory=directory, manifest=manifest)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
