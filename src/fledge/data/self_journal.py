"""What a target wrote, batch by batch, so that an interrupted run need not ask again.

One line of JSON per batch, flushed to the disk; the first line says what the tries depend on. A
killed run leaves at most half a line at the end, which is cut off when the file is opened again.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fledge.contracts.errors import MismatchError
from fledge.store.capacity import translated_disk_errors
from fledge.store.stage_directory import first_difference


class Draft(NamedTuple):
    """What came of one try."""

    text: str
    is_cut: bool
    """It ran into the limit of tokens."""


class SelfJournal:
    """The batches of one source, in order."""

    def __init__(self, path: Path, basis: Mapping[str, Any]) -> None:
        """`basis` is everything the batches depend on; a journal of other work is refused."""
        self._path = path
        self._basis = json.loads(json.dumps(dict(basis)))

    def read(self) -> Iterator[list[Draft]]:
        """The batches written so far; afterwards the file ends with the last whole one."""
        if not self._path.exists():
            self._append(self._basis)
            return
        end = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file):
                document = _parsed(line)
                if document is None:
                    break
                if number == 0:
                    self._check(document)
                else:
                    yield [Draft(text, is_cut) for text, is_cut in document]
                end += len(line)
        if end == 0:
            self._path.unlink()
            self._append(self._basis)
        else:
            os.truncate(self._path, end)

    def write(self, batch: Sequence[Draft]) -> None:
        self._append(batch)

    def _append(self, document: Any) -> None:
        with translated_disk_errors(self._path, place="output"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _check(self, found: Any) -> None:
        difference = first_difference(found, self._basis)
        if difference is not None:
            name, there, wanted = difference
            raise MismatchError(
                f"{self._path} holds prompts for {name} = {there!r}, and this run has {name} = "
                f"{wanted!r}; remove the file and start again."
            )


def _parsed(line: bytes) -> Any:
    """The document of a whole line; None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None
