"""Lines into numbered row files of bounded size, each whole when its name is there.

Where one file ends and the next begins follows from the lines alone, so a run that goes on after a
kill makes the same files.
"""

from pathlib import Path
from typing import IO

from fledge.store.cache_publish import flush
from fledge.store.rows import row_files, rows_file

MAX_ROWS = 20_000
MAX_BYTES = 64_000_000


class RowFiles:
    """The row files of one directory, written in order from number `first` on."""

    def __init__(self, directory: Path, *, first: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: IO[bytes] | None = None
        self.number = first
        """Of the file that the next line belongs to."""

        self.num_rows = 0
        self.num_bytes = 0
        """In the file that is being written."""

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._temporary.open("wb")
        self._file.write(line)
        self.num_rows += 1
        self.num_bytes += len(line)

    def publish(self) -> None:
        """Give the file its name; without lines there is none."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        flush(self._temporary)
        self._temporary.replace(rows_file(self._directory, self.number))
        flush(self._directory)
        self.number += 1
        self.num_rows = self.num_bytes = 0

    def close(self) -> None:
        """Let go of a file that was not published."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _temporary(self) -> Path:
        path = rows_file(self._directory, self.number)
        return path.with_name(f".{path.name}.tmp")


def remove_from(directory: Path, first: int) -> None:
    """Remove the row files from number `first` on, and what a killed run left half written."""
    if not directory.is_dir():
        return
    kept = {rows_file(directory, number) for number in range(first)}
    for path in [*row_files(directory), *directory.glob(".rows-*.tmp")]:
        if path not in kept:
            path.unlink()
