"""Files of batches: kept over a restart, owned, bounded; lines and results that are damaged."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.batch_settings import BatchSettings
from fledge.contracts.errors import ConfigError
from fledge.server.api_errors import (
    ApiError,
    BodyTooLargeError,
    ClientGoneError,
    InvalidRequestError,
    NotFoundError,
    SlowClientError,
)
from fledge.server.batch_lines import MAX_ERRORS, check_lines
from fledge.server.batch_records import BatchRecord, StoredFile, new_batch_id, new_file_id
from fledge.server.batch_results import BatchResults, answered, unasked
from fledge.server.batch_store import BatchStore
from fledge.server.streamed_body import StreamedBody
from fledge.server.uploads import UploadForm

NOW = int(time.time())


def a_file(owner: str = "me", **fields: Any) -> StoredFile:
    given = {
        "id": new_file_id(),
        "owner": owner,
        "filename": "x",
        "purpose": "batch",
        "num_bytes": 3,
        "created_at": NOW,
        "expires_at": NOW + 1000,
        **fields,
    }
    return StoredFile(**given)


def a_batch(input_file_id: str, **fields: Any) -> BatchRecord:
    given = {
        "id": new_batch_id(),
        "owner": "me",
        "endpoint": "/v1/completions",
        "input_file_id": input_file_id,
        "completion_window": "24h",
        "created_at": NOW,
        "expires_at": NOW + 1000,
        "output_name": new_file_id(),
        "error_name": new_file_id(),
        "keep_results_s": 1000,
        **fields,
    }
    return BatchRecord(**given)


async def put(store: BatchStore, file: StoredFile, content: bytes = b"abc") -> StoredFile:
    store.upload_path(file.id).write_bytes(content)
    await store.adopt(file)
    return file


def in_store(
    directory: Path, work: Callable[[BatchStore], Awaitable[Any]], **settings: Any
) -> None:
    async def run() -> None:
        store = BatchStore(directory, BatchSettings(**settings))
        try:
            await work(store)
        finally:
            store.close()

    asyncio.run(run())


def test_files_and_batches_outlive_the_server(tmp_path: Path) -> None:
    file, strange = a_file(), a_file("other", created_at=NOW - 5)
    batch = a_batch(file.id, metadata={"a": "b"})
    over = a_batch(file.id, status="completed")

    async def fill(store: BatchStore) -> None:
        for one in (strange, file):
            await put(store, one)
        for record in (batch, over):
            await store.save(record)
            store.data_path(record.output_name).write_bytes(b"result\n")
        store.upload_path(new_file_id()).write_bytes(b"half")

    async def look(store: BatchStore) -> None:
        assert store.files_of("me") == [file]
        assert store.file("other", strange.id) == strange
        assert store.batch("me", batch.id) == batch
        assert store.data_path(file.id).read_bytes() == b"abc"
        assert store.data_path(batch.output_name).exists()
        assert not store.data_path(over.output_name).exists(), "nobody knows of it"
        for owner, wanted in (("other", file.id), ("me", "../../etc/passwd"), ("me", "")):
            with pytest.raises(NotFoundError, match="there is no file"):
                store.file(owner, wanted)
        with pytest.raises(ConfigError, match="another server keeps the files"):
            BatchStore(tmp_path, BatchSettings())

    in_store(tmp_path, fill)
    (tmp_path / "files" / "file-x.json").write_text("{", encoding="utf-8")
    in_store(tmp_path, look)
    assert not list((tmp_path / "uploads").iterdir())
    assert (tmp_path / "files" / "file-x.json").exists(), "what cannot be read is left alone"
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0


def test_limits_of_the_store(tmp_path: Path) -> None:
    async def work(store: BatchStore) -> None:
        async def try_room(num_bytes: int) -> None:
            async with store.room_for(num_bytes):
                pass

        await put(store, a_file(), b"x" * 60)
        await try_room(500)
        with pytest.raises(BodyTooLargeError, match=r"take \d+ bytes of at most 1.0 kB"):
            await try_room(941)
        async with store.room_for(400):
            with pytest.raises(BodyTooLargeError, match="at most 2 files"):
                await try_room(1)
        store.files.clear()
        async with store.room_for(400):
            with pytest.raises(BodyTooLargeError, match="of at most 1.0 kB"):
                await try_room(500)
        await try_room(500)
        for _ in range(2):
            await store.save(a_batch("file"))
        with pytest.raises(BodyTooLargeError, match="at most 2 batches"):
            store.require_room_for_batch()

    in_store(tmp_path, work, max_files=2, max_total_bytes=1000)


def test_old_things_are_removed(tmp_path: Path) -> None:
    async def work(store: BatchStore) -> None:
        old, needed = a_file(expires_at=NOW - 1), a_file(expires_at=NOW - 1)
        for one in (old, needed, a_file()):
            await put(store, one)
        running = a_batch(needed.id)
        forgotten = a_batch(old.id, status="failed", moments={"failed": NOW - 3 * 86_400})
        for batch in (running, forgotten, a_batch(old.id, status="failed")):
            await store.save(batch)
        with pytest.raises(NotFoundError):
            store.file("me", old.id)
        await store.sweep()
        assert old.id not in store.files
        assert not store.data_path(old.id).exists()
        assert needed.id in store.files, "a batch still reads it"
        assert len(store.files) == len(store.batches) == 2
        assert forgotten.id not in store.batches

    in_store(tmp_path, work, keep_days=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_lines": 0}, "max_lines is 0"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"keep_days": 0.0}, "keep_days is 0.0"),
    ],
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchSettings(**settings)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be kept in .*choose another --batch-dir"):
        BatchStore(tmp_path / "file", BatchSettings())


def test_lines_that_are_wrong_throughout(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    long = b'{"custom_id": "' + b"x" * 300 + b'"}\n'
    file.write_bytes(b"\n" + long + b"[" * 90 + b"\n" + b"nothing\n" * 200)
    check = check_lines(file, "/v1/completions", max_lines=1000, max_line_bytes=100)
    assert check.num_lines == 202
    assert len(check.errors) == MAX_ERRORS
    assert [(one["line"], one["code"]) for one in check.errors[:3]] == [
        (2, "line_too_long"),
        (3, "invalid_json_line"),
        (4, "invalid_json_line"),
    ]


def answer_of(custom_id: str) -> dict[str, Any]:
    counts = {"prompt_tokens": 3, "completion_tokens": 2}
    usage = {**counts, "prompt_tokens_details": {"cached_tokens": 1}}
    return answered(custom_id, "r", 200, {"text": "y" * 50, "usage": usage})


def test_results_that_a_crash_damaged(tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    record = a_batch("file")
    results = BatchResults(record, output, errors)
    for custom_id in "abcd":
        results.add(answer_of(custom_id))
    results.add(unasked("e", "batch_expired", "late"))
    results.close()
    lines = output.read_bytes().splitlines(keepends=True)
    torn = lines[3][:-9]
    output.write_bytes(lines[0] + b"\0" * 70 + b"\n" + lines[2] + lines[0] + lines[1] + torn)
    results = BatchResults(record, output, errors)
    assert (record.num_completed, record.num_failed) == (3, 1)
    assert (record.usage.num_prompt, record.usage.num_cached, record.usage.num_answer) == (9, 3, 6)
    assert [results.is_done(custom_id) for custom_id in "abcde"] == [True] * 3 + [False, True]
    results.add(answer_of("d"))
    results.commit()
    results.close()
    results.commit()
    found = [json.loads(line)["custom_id"] for line in output.read_bytes().splitlines()]
    assert found == ["a", "c", "b", "d"]


BOUNDARY = {"content_type": "multipart/form-data; boundary=b"}


def form(*parts: tuple[str, bytes]) -> bytes:
    written = [
        b'--b\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n'
        % (name.encode(), value)
        for name, value in parts
    ]
    return b"".join(written) + b"--b--\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_forms_in_any_portions(size: int) -> None:
    content = bytes(range(256)) * 8 + b"\r\n--"
    read = UploadForm(**BOUNDARY, max_file_bytes=5000)
    data = form(("purpose", b"batch"), ("file", content))
    for start in range(0, len(data), size):
        read.feed(data[start : start + size])
    read.finish()
    assert read.take() == content
    assert read.take() == b""
    assert (read.fields, read.filename, read.num_bytes) == ({"purpose": "batch"}, "f", len(content))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (form(("file", b"x" * 101)), "larger than 100 bytes"),
        (form(("file", b""), ("file", b"")), "two parts called file"),
        (form(("purpose", b"x" * 5000)), "a field of the form is too long"),
        (form(*((str(number), b"") for number in range(17))), "more than 16 fields"),
        (b"--b\r\n" + b"x" * 10_000, "cannot be read"),
    ],
)
def test_forms_that_are_refused(data: bytes, words: str) -> None:
    read = UploadForm(**BOUNDARY, max_file_bytes=100)
    with pytest.raises(ApiError, match=words):
        read.feed(data)


def test_bodies_that_come_too_slowly_or_never_end() -> None:
    async def messages(*pieces: bytes, timeout_s: float = 5.0, max_bytes: int = 10) -> list[Any]:
        waiting = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]

        async def receive() -> Any:
            if waiting:
                return waiting.pop(0)
            return await asyncio.Event().wait()

        body = StreamedBody(receive, max_bytes=max_bytes, timeout_s=timeout_s)
        return [await body.receive() for _ in range(len(pieces) + 1)]

    with pytest.raises(SlowClientError, match="too slowly: 2 bytes"):
        asyncio.run(messages(b"ab", timeout_s=0.01))
    with pytest.raises(BodyTooLargeError, match="larger than 10 bytes"):
        asyncio.run(messages(b"x" * 6, b"x" * 6))

    async def leave() -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        await StreamedBody(receive, max_bytes=1, timeout_s=1).receive()

    with pytest.raises(ClientGoneError):
        asyncio.run(leave())


def test_a_form_without_a_boundary() -> None:
    with pytest.raises(InvalidRequestError, match="with a boundary"):
        UploadForm("multipart/form-data", 10)
