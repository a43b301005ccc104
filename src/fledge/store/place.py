"""What a directory of files offers, wherever it is.

A file appears whole or not at all, and `create` never replaces one. Only what lies right below the
directory is known here.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fledge.contracts.errors import ArtifactError

LOCK_NAME = ".lock"
Chunk = bytes | memoryview


class Place(Protocol):
    """Where the files of one directory are."""

    def file(self, name: str) -> str:
        """The full name of a file, for messages."""

    def locked(self) -> AbstractContextManager[None]:
        """Make the directory if need be, and keep other writers out meanwhile."""

    def names(self) -> set[str]:
        """Of everything right below the directory."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, in order of their names."""

    def read(self, name: str) -> bytes | None:
        """All of a small file; None where there is none."""

    def read_range(self, name: str, start: int, length: int) -> memoryview:
        """A part of a file; may be called from many threads at once."""

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """The same into memory that is there already, piece after piece, none of them empty."""

    def create(self, name: str, chunks: Sequence[Chunk]) -> bool:
        """Write a new file; False, with nothing changed, where there is one already."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file over what may be there."""

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""


def require_all(file: str, start: int, length: int, found: int) -> None:
    if found != length:
        raise ArtifactError(
            f"{file} ends at byte {start + found}, and bytes up to {start + length} belong to it: "
            "it was cut off."
        )
