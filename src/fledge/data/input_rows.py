"""The rows of a finished directory by number, without holding them: 12 bytes per row."""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from fledge.contracts.conversation import Conversation, copy_id
from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress
from fledge.store.manifest import Manifest
from fledge.store.rows import id_field, row_files


class InputRows:
    """Conversations by their position in a directory, counted over all its files from 0."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        progress: Progress,
        *,
        copies: int = 1,
        source_copies: Mapping[str, int] | None = None,
    ) -> None:
        """Reads the files once and refuses those that are not what the manifest says.

        Behind the last row they begin anew, `copies` times in all, with ids that tell them apart;
        rows of some sources as often as `source_copies` says.
        """
        self.directory = directory
        self._source_copies = source_copies or {}
        self._copies_of = array("H")
        self._paths = row_files(directory)
        self._offsets = array("q")
        self._file_of = array("i")
        self._open_number = -1
        self._open_file: BinaryIO | None = None
        self.num_bytes = sum(path.stat().st_size for path in self._paths)
        with progress.task(f"reading {directory.name}", self.num_bytes) as task:
            for number, path in enumerate(self._paths):
                task.advance(self._index(number, path, manifest, copies))
        self._rounds = self._make_rounds(copies)
        self._ends = list(accumulate(map(len, self._rounds)))

    def _make_rounds(self, copies: int) -> list[Sequence[int]]:
        """Which rows come in the first round, in the second, and so on."""
        if not self._source_copies:
            return [range(len(self._offsets))] * copies
        return [
            array("q", (row for row, count in enumerate(self._copies_of) if count > number))
            for number in range(max(self._copies_of, default=0))
        ]

    def _index(self, number: int, path: Path, manifest: Manifest, copies: int) -> int:
        offset = 0
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for line in file:
                self._offsets.append(offset)
                self._file_of.append(number)
                if self._source_copies:
                    source = json.loads(id_field(line)).rpartition("/")[0]
                    self._copies_of.append(self._source_copies.get(source, copies))
                offset += len(line)
                digest.update(line)
        entry = manifest.files.get(path.name)
        if entry is None or entry["sha256"] != digest.hexdigest():
            state = "is not in the manifest" if entry is None else "was changed after it was made"
            raise ArtifactError(f"{path} {state}; remove {path.parent} and make it again.")
        return offset

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> Conversation:
        copy = bisect_right(self._ends, row)
        found = self._read(self._rounds[copy][row - (self._ends[copy - 1] if copy else 0)])
        return replace(found, id=copy_id(found.id, copy)) if copy else found

    def _read(self, row: int) -> Conversation:
        number = self._file_of[row]
        file = self._file(number)
        file.seek(self._offsets[row])
        try:
            return Conversation.from_json(json.loads(file.readline()))
        except (ValueError, ArtifactError) as error:
            line = row - self._file_of.index(number) + 1
            raise ArtifactError(
                f"{self._paths[number]}, line {line} is damaged: {error}"
            ) from error

    def _file(self, number: int) -> BinaryIO:
        """One file is open at a time: rows are mostly read in order."""
        if self._open_file is None or number != self._open_number:
            self.close()
            self._open_file, self._open_number = self._paths[number].open("rb"), number
        return self._open_file

    def close(self) -> None:
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None

    def __enter__(self) -> "InputRows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
