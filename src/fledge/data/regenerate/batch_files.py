"""Files of requests on disk, and which of them are with the server."""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.chat_api import body_of, route_of
from fledge.data.regenerate.failures import Refused
from fledge.data.regenerate.worklist import Worklist
from fledge.store.cache_publish import flush


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one file may hold; the defaults are the API's."""

    requests: int = 50_000
    num_bytes: int = 200_000_000


@dataclass(slots=True)
class OpenBatch:
    """A batch that was handed in and not read back yet, as the journal tells."""

    number: int
    file_id: str
    batch_id: str | None = None


def open_batches(records: Iterable[dict[str, Any]]) -> list[OpenBatch]:
    """Batches that were begun and not closed."""
    found: dict[int, OpenBatch] = {}
    for record in records:
        number = record["number"]
        if "file_id" in record:
            found[number] = OpenBatch(number, record["file_id"])
        elif "batch_id" in record:
            found[number].batch_id = record["batch_id"]
        elif record.get("is_closed"):
            del found[number]
    return list(found.values())


def requests_file(directory: Path, number: int) -> Path:
    return directory / f"batch-{number:05d}.jsonl"


def write_requests(
    file: Path,
    rows: Iterable[int],
    worklist: Worklist,
    settings: RegenerateSettings,
    model: str,
    limits: FileLimits,
) -> tuple["array[int]", "array[int]"]:
    """Write requests for open rows until the file is full; returns rows written and rows left."""
    written, left = array("q"), array("q")
    num_bytes = 0
    with file.open("wb") as lines:
        for row in rows:
            if left:
                left.append(row)
                continue
            dialogue = worklist.dialogue(row)
            question = dialogue.question
            assert question is not None, "a row that needs nothing was to be asked"
            try:
                body = body_of(question, settings, model)
            except Refused as error:
                worklist.fail(dialogue, str(error))
                continue
            request = {
                "custom_id": f"{row}-{question.turn}",
                "method": "POST",
                "url": f"/v1{route_of(settings)}",
                "body": body,
            }
            line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
            is_full = len(written) >= limits.requests or num_bytes + len(line) > limits.num_bytes
            if written and is_full:
                left.append(row)
                continue
            lines.write(line)
            written.append(row)
            num_bytes += len(line)
    flush(file)
    flush(file.parent)
    return written, left


def rows_in(file: Path) -> "array[int]":
    """The rows that a file asks about."""
    rows = array("q")
    try:
        with file.open("rb") as lines:
            for line in lines:
                rows.append(parse_custom_id(json.loads(line)["custom_id"])[0])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"{file} is missing or damaged ({error!r}); a batch that is with the server needs it."
        ) from error
    return rows


def parse_custom_id(custom_id: str) -> tuple[int, int]:
    """Row and turn; -1 for what is none of ours."""
    row, dash, turn = custom_id.partition("-")
    if not (dash and row.isdecimal() and turn.isdecimal()):
        return -1, -1
    return int(row), int(turn)
