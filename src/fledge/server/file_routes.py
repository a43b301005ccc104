"""/v1/files: what batches read and write."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from fledge.server.api_errors import ClientGoneError, InvalidRequestError, NotFoundError
from fledge.server.batch_records import StoredFile, new_file_id
from fledge.server.batch_store import BatchStore, page_of
from fledge.server.client_sender import ClientSender
from fledge.server.service import Service
from fledge.server.uploads import UploadForm, receive_form

router = APIRouter()

_CHUNK_BYTES = 256 << 10
_SHORTEST_KEEP_S = 3600
_UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def store_of(request: Request) -> BatchStore:
    service: Service = request.app.state.service
    return service.batch_store


def owner_of(request: Request) -> str:
    owner: str = request.state.caller.owner
    return owner


@router.post("/v1/files", openapi_extra=_UPLOAD_FORM)
async def upload_file(request: Request) -> dict[str, Any]:
    """Keep a file of requests."""
    store = store_of(request)
    _refuse_foreign_pages(request)
    limits = store.settings
    form = UploadForm(request.headers.get("content-type", ""), limits.max_file_bytes)
    length = request.headers.get("content-length", "")
    async with store.room_for(int(length) if length.isdecimal() else limits.max_file_bytes):
        return (await _keep(request, store, form)).public


async def _keep(request: Request, store: BatchStore, form: UploadForm) -> StoredFile:
    file_id = new_file_id()
    path = store.upload_path(file_id)
    await receive_form(request, form, path)
    try:
        keep_s = _checked_fields(form.fields, store.keep_s)
        now = int(time.time())
        file = StoredFile(
            id=file_id,
            owner=owner_of(request),
            filename=form.filename,
            purpose="batch",
            num_bytes=form.num_bytes,
            created_at=now,
            expires_at=now + keep_s,
        )
        await store.adopt(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return file


def _refuse_foreign_pages(request: Request) -> None:
    """Forms, unlike JSON, may be sent by any web page that the user of a browser looks at."""
    origin = request.headers.get("origin")
    service: Service = request.app.state.service
    own = f"://{request.headers.get('host')}"
    if origin is None or origin.endswith(own) or origin in service.settings.cors_origins:
        return
    raise InvalidRequestError(
        f"pages of {origin} may not upload files here.", code="foreign_origin"
    )


def _checked_fields(fields: dict[str, str], longest_s: int) -> int:
    """Refuse what would be ignored; returns for how long the file is kept."""
    known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if unknown := sorted(fields.keys() - known):
        raise InvalidRequestError(
            f"this server knows no parameter {unknown[0]!r}.",
            param=unknown[0],
            code="unknown_parameter",
        )
    if fields.get("purpose") != "batch":
        raise InvalidRequestError("purpose must be batch.", param="purpose")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise InvalidRequestError(
            "expires_after counts from created_at only.", param="expires_after[anchor]"
        )
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return longest_s
    if not (seconds.isascii() and seconds.isdecimal() and int(seconds) >= _SHORTEST_KEEP_S):
        raise InvalidRequestError(
            f"expires_after must be at least {_SHORTEST_KEEP_S} seconds.",
            param="expires_after[seconds]",
        )
    return min(int(seconds), longest_s)


@router.get("/v1/files")
async def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """The caller's files."""
    found = store_of(request).files_of(owner_of(request))
    found = [one for one in found if purpose in (None, one.purpose)]
    return page_of(found[::-1] if order == "asc" else found, after=after, limit=limit)


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, request: Request) -> dict[str, Any]:
    """One file's description."""
    return store_of(request).file(owner_of(request), file_id).public


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    """Forget a file."""
    store = store_of(request)
    await store.delete(store.file(owner_of(request), file_id))
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def get_content(file_id: str, request: Request) -> Response:
    """What is in a file."""
    store = store_of(request)
    file = store.file(owner_of(request), file_id)
    service: Service = request.app.state.service
    return FileContent(file, store.data_path(file.id), service.settings.client_timeout_s)


class FileContent(Response):
    """A file, sent to a client that has to take it in time."""

    def __init__(self, file: StoredFile, path: Path, timeout_s: float) -> None:
        super().__init__()
        self._file, self._path, self._timeout_s = file, path, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        sender = ClientSender(scope, send, self._timeout_s)
        try:
            opened = await asyncio.to_thread(self._path.open, "rb")
        except FileNotFoundError:
            raise NotFoundError(f"file {self._file.id!r} was deleted just now.") from None
        with opened:
            await sender.start(
                200,
                [
                    (b"content-type", b"application/octet-stream"),
                    # It holds what clients sent: no browser may take it for a page.
                    (b"content-disposition", b"attachment"),
                    (b"x-content-type-options", b"nosniff"),
                    (b"content-length", b"%d" % self._file.num_bytes),
                ],
            )
            try:
                while data := await asyncio.to_thread(opened.read, _CHUNK_BYTES):
                    await sender.write(data, is_last=False)
                await sender.write(b"", is_last=True)
            except ClientGoneError as error:
                scope["state"]["error"] = error
                await sender.cut()
