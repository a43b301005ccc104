"""Calls of the Batch API: /v1/files and /v1/batches."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.data.regenerate.calls import Caller, read_id
from fledge.data.regenerate.failures import BadDocument, Unanswered, explain_status

_COMPLETION_WINDOW = "24h"
_LIST_SIZE = 100


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the server sees it."""

    id: str
    status: str
    input_file_id: str
    result_file_ids: tuple[str, ...]
    """Of answers and of errors, where there are any."""

    errors: str
    """Why it failed as a whole."""

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one request of a batch."""

    custom_id: str
    status: int
    """HTTP status of the request; 0 when it was never made."""

    body: Any
    reason: str


async def upload_requests(caller: Caller, file: Path) -> str:
    """Hand in a file of requests; returns its id."""
    return await caller.upload("/files", file, {"purpose": "batch"})


async def start_batch(caller: Caller, input_file_id: str, route: str, *, is_new: bool) -> str:
    """Have an uploaded file answered; returns the batch's id.

    A batch may have been made although its answer was lost or we were killed. One file never gets
    two batches: unless the file is new, and after each failure, the server's list is looked at.
    """
    body = {
        "input_file_id": input_file_id,
        "endpoint": f"/v1{route}",
        "completion_window": _COMPLETION_WINDOW,
    }
    num_failures = 0
    while True:
        if not is_new or num_failures:
            found = await _find_batch(caller, input_file_id)
            if found is not None:
                return found
        try:
            return await caller.post("/batches", body, read_id, retries=0)
        except Unanswered:
            num_failures += 1
            if num_failures > caller.limits.retries:
                raise
        await asyncio.sleep(caller.limits.backoff.pause_s(num_failures))


async def _find_batch(caller: Caller, input_file_id: str) -> str | None:
    after = ""
    while True:
        page = await caller.get(f"/batches?limit={_LIST_SIZE}{after}", _read_page)
        for batch in page:
            if batch.input_file_id == input_file_id:
                return batch.id
        if len(page) < _LIST_SIZE:
            return None
        after = f"&after={page[-1].id}"


async def look_at_batch(caller: Caller, batch_id: str) -> Batch:
    return await caller.get(f"/batches/{batch_id}", read_batch)


async def fetch_results(caller: Caller, file_id: str, file: Path) -> None:
    """Write a file of results to disk; `read_results` reads it."""
    await caller.download(f"/files/{file_id}/content", file)


def read_batch(document: Any) -> Batch:
    """A batch object of the API."""
    batch_id = read_id(document)
    files = (document.get("output_file_id"), document.get("error_file_id"))
    errors = document.get("errors")
    listed = errors.get("data") if isinstance(errors, dict) else None
    said = [str(one.get("message")) for one in listed or () if isinstance(one, dict)]
    return Batch(
        id=batch_id,
        status=str(document.get("status")),
        input_file_id=str(document.get("input_file_id")),
        result_file_ids=tuple(one for one in files if isinstance(one, str) and one),
        errors="; ".join(said[:3]),
    )


def _read_page(document: Any) -> list[Batch]:
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise BadDocument("no list of batches")
    return [read_batch(one) for one in listed]


def read_results(file: Path) -> Iterator[BatchResult]:
    """The results in a file; lines that make no sense are left out."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict) and isinstance(document.get("custom_id"), str):
                yield _result(document)


def _result(document: dict[str, Any]) -> BatchResult:
    response, error = document.get("response"), document.get("error")
    if not isinstance(response, dict) or not isinstance(response.get("status_code"), int):
        said = error.get("message") or error.get("code") if isinstance(error, dict) else None
        return BatchResult(document["custom_id"], 0, None, str(said or "no response"))
    status, body = response["status_code"], response.get("body")
    return BatchResult(
        document["custom_id"], status, body, explain_status(status, json.dumps(body))
    )
