"""/v1/batches: files of requests, answered when there is time."""

import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from fledge.server.api_errors import ConflictError, InvalidRequestError, UnavailableError
from fledge.server.batch_records import BatchRecord, new_batch_id, new_file_id
from fledge.server.batch_runner import BatchRunner
from fledge.server.batch_store import page_of
from fledge.server.file_routes import owner_of, store_of

router = APIRouter()

_WINDOW = r"^[1-9][0-9]{0,5}[smhd]$"
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 7 * 86_400


class OutputExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchRequest(BaseModel):
    """`POST /v1/batches`"""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str = Field(pattern=_WINDOW)
    """OpenAI's is 24h; here any number of s, m, h or d up to a week."""

    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiresAfter | None = None


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner | None = request.app.state.batch_runner
    if runner is None:
        raise UnavailableError("batches are not worked on here.")
    return runner


@router.post("/v1/batches")
async def create_batch(asked: BatchRequest, request: Request) -> dict[str, Any]:
    """Have a file of requests answered."""
    store, runner, owner = store_of(request), _runner(request), owner_of(request)
    file = store.file(owner, asked.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequestError(
            f"file {file.id} has the purpose {file.purpose}; a batch reads one of purpose batch.",
            param="input_file_id",
        )
    store.require_room_for_batch()
    window_s = _seconds(asked.completion_window)
    keep_s = store.keep_s
    if asked.output_expires_after is not None:
        keep_s = min(keep_s, asked.output_expires_after.seconds)
    now = int(time.time())
    batch = BatchRecord(
        id=new_batch_id(),
        owner=owner,
        endpoint=asked.endpoint,
        input_file_id=file.id,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + window_s,
        output_name=new_file_id(),
        error_name=new_file_id(),
        keep_results_s=keep_s,
        metadata=asked.metadata,
    )
    await store.save(batch)
    runner.look()
    return batch.public


def _seconds(window: str) -> int:
    seconds = int(re.sub(r"\D", "", window)) * _UNIT_S[window[-1]]
    if seconds > _LONGEST_WINDOW_S:
        raise InvalidRequestError(
            f"completion_window is {window}; it must be at most 7d.", param="completion_window"
        )
    return seconds


@router.get("/v1/batches")
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """The caller's batches."""
    return page_of(store_of(request).batches_of(owner_of(request)), after=after, limit=limit)


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """How far a batch is."""
    return store_of(request).batch(owner_of(request), batch_id).public


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> dict[str, Any]:
    """End a batch; what is finished stays."""
    batch = store_of(request).batch(owner_of(request), batch_id)
    if batch.is_over and batch.status != "cancelled":
        raise ConflictError(f"batch {batch.id} is {batch.status}; there is nothing to cancel.")
    await _runner(request).cancel(batch)
    return batch.public
