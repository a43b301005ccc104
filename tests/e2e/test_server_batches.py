"""Files and batches with the real openai client and with our own, on one server."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.batch_answerer import BatchAnswerer, Polling
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.stage import regenerate
from tests.e2e.server_support import (
    KEY,
    MODEL,
    OTHER_KEY,
    PATIENCE_S,
    RunningServer,
    altered,
    wait_until,
)
from tests.unit.data.regenerate_support import make_source, output_bytes, simple_rows

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 6000, "temperature": 0}


@pytest.fixture
def server(limited_server: RunningServer) -> Iterator[RunningServer]:
    limited_server.wait_until_ready()
    with altered(limited_server, client_timeout_s=PATIENCE_S):
        yield limited_server


def line(custom_id: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": custom_id, "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def upload(server: RunningServer, lines: list[Any]) -> str:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    return server.openai.files.create(file=("asked.jsonl", text.encode()), purpose="batch").id


def start(server: RunningServer, lines: list[Any], window: str = "24h", **more: Any) -> str:
    batch = server.openai.batches.create(
        input_file_id=upload(server, lines),
        endpoint=COMPLETION,
        completion_window=window,  # type: ignore[arg-type]
        **more,
    )
    assert batch.status == "validating"
    return batch.id


def over(server: RunningServer, batch_id: str) -> Any:
    def is_over() -> bool:
        status = server.openai.batches.retrieve(batch_id).status
        return status in ("completed", "failed", "expired", "cancelled")

    wait_until(is_over, "the batch is over")
    return server.openai.batches.retrieve(batch_id)


def results(server: RunningServer, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = server.openai.files.content(file_id).text
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_a_batch_from_its_file_to_its_results(server: RunningServer) -> None:
    asked = [line(f"line {number}") for number in range(7)]
    asked += [
        line("hot", temperature=-1),
        line("other", model="other"),
        line("streamed", stream=True),
    ]
    batch_id = start(server, asked, metadata={"run": "1"})
    batch = over(server, batch_id)
    assert batch.status == "completed"
    assert batch.metadata == {"run": "1"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (10, 7)
    assert batch.request_counts.failed == 3
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = results(server, batch.output_file_id)
    assert list(batch.usage.model_dump())[:1] == ["input_tokens"]
    assert batch.usage.output_tokens == 28
    for custom_id, result in answers.items():
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        direct = server.complete(prompt=custom_id, max_tokens=4, temperature=0).json()
        body = result["response"]["body"]
        assert body["choices"] == direct["choices"]
        assert body["usage"]["completion_tokens"] == 4
    errors = results(server, batch.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in errors.items()} == {
        "hot": 400,
        "other": 404,
        "streamed": 400,
    }
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert "cannot be streamed" in errors["streamed"]["response"]["body"]["error"]["message"]


def test_files(server: RunningServer) -> None:
    content = b'{"custom_id": "x"}\n' * 100
    created = server.openai.files.create(file=("../../x.jsonl", content), purpose="batch")
    assert (created.bytes, created.filename, created.purpose) == (1900, "../../x.jsonl", "batch")
    assert server.openai.files.retrieve(created.id) == created
    assert server.openai.files.content(created.id).content == content
    second = server.openai.files.create(
        file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert second.expires_at - second.created_at == 3600
    listed = [one.id for one in server.openai.files.list(limit=2)]
    assert listed[:2] == [second.id, created.id]
    oldest_first = server.http.get("/v1/files", params={"order": "asc", "after": created.id}).json()
    assert [one["id"] for one in oldest_first["data"]] == [second.id]
    assert server.openai.files.delete(created.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        server.openai.files.content(created.id)
    download = server.http.get(f"/v1/files/{second.id}/content")
    assert download.headers["content-disposition"] == "attachment"
    assert download.headers["x-content-type-options"] == "nosniff"


def test_files_and_batches_are_seen_by_their_key_only(server: RunningServer) -> None:
    batch_id = start(server, [line("mine")])
    batch = over(server, batch_id)
    other = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {OTHER_KEY}"})
    with other:
        for path in (
            f"/v1/files/{batch.input_file_id}",
            f"/v1/files/{batch.output_file_id}/content",
            f"/v1/batches/{batch_id}",
        ):
            assert server.http.get(path).status_code == 200
            assert other.get(path).status_code == 404
        assert other.delete(f"/v1/files/{batch.input_file_id}").status_code == 404
        assert other.post(f"/v1/batches/{batch_id}/cancel").status_code == 404
        body = {"input_file_id": batch.input_file_id, "endpoint": COMPLETION}
        stolen = other.post("/v1/batches", json={**body, "completion_window": "24h"})
        assert stolen.status_code == 404
        assert other.get("/v1/files").json()["data"] == []
        assert other.get("/v1/batches").json()["data"] == []
    again = server.post("/v1/batches", {**body, "completion_window": "8d"})
    assert "at most 7d" in again.json()["error"]["message"]
    ours = server.openai.batches.list(limit=1)
    assert ours.data[0].id == batch_id
    assert server.http.get("/v1/batches", params={"after": "x"}).status_code == 400


def test_a_file_that_is_no_batch(server: RunningServer) -> None:
    asked: list[Any] = [
        line("a"),
        line("a"),
        {**line("b"), "url": CHAT},
        {**line("c"), "method": "GET"},
        {"custom_id": 1},
        {**line("d"), "body": []},
        [],
    ]
    batch = over(server, start(server, asked))
    assert batch.status == "failed"
    assert [(one.line, one.code) for one in batch.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_url"),
        (4, "invalid_method"),
        (5, "missing_required_parameter"),
        (6, "missing_required_parameter"),
        (7, "invalid_json_line"),
    ]
    assert batch.output_file_id is batch.error_file_id is None
    many = over(server, start(server, [line(str(number)) for number in range(61)]))
    assert many.errors.data[0].code == "too_many_tasks"
    empty = over(server, start(server, []))
    assert empty.errors.data[0].code == "empty_file"
    with pytest.raises(openai.ConflictError, match="nothing to cancel"):
        server.openai.batches.cancel(batch.id)


def test_people_come_before_batches(server: RunningServer) -> None:
    """A batch fills its share of the engine; requests are served at once and none is refused."""
    batch_id = start(server, [line(f"long {number}", **LONG) for number in range(4)])
    wait_until(lambda: server.stats()["num_running"] == 2, "the batch runs")
    input_file_id = server.openai.batches.retrieve(batch_id).input_file_id
    with pytest.raises(openai.ConflictError, match="still reads file"):
        server.openai.files.delete(input_file_id)
    codes: list[int] = []

    def complete() -> None:
        codes.append(server.complete(max_tokens=30).status_code)

    # Four are admitted, two of them into the queue: lines of the batch take no room from them.
    threads = [threading.Thread(target=complete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 4
    counts = server.openai.batches.retrieve(batch_id).request_counts
    assert counts.completed + counts.failed == 0
    assert server.openai.batches.cancel(batch_id).status == "cancelling"
    batch = over(server, batch_id)
    assert batch.status == "cancelled"
    server.wait_until_idle()
    left = results(server, batch.error_file_id)
    assert {one["error"]["code"] for one in left.values()} == {"batch_cancelled"}
    assert len(left) == 4
    assert server.openai.batches.cancel(batch_id).status == "cancelled"


def test_a_batch_that_takes_too_long_expires(server: RunningServer) -> None:
    asked = [line("quick"), *(line(f"long {number}", max_tokens=6000) for number in range(3))]
    batch = over(server, start(server, asked, window="1s"))
    assert batch.status == "expired"
    assert batch.expires_at == batch.created_at + 1
    if batch.output_file_id is not None:  # on a busy machine nothing is quick enough
        assert results(server, batch.output_file_id).keys() == {"quick"}
    left = results(server, batch.error_file_id)
    assert {one["error"]["code"] for one in left.values()} == {"batch_expired"}
    assert left["long 1"]["response"] is None
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"x", {"content-type": "application/json"}, 400, "sent as a form"),
        (b"x", {"content-type": "multipart/form-data"}, 400, "sent as a form"),
        (b"garbage", {"content-type": "multipart/form-data; boundary=b"}, 400, "cannot be read"),
        (b"--b\r\n\r\n", {"content-type": "multipart/form-data; boundary=b"}, 400, "no end"),
        (b"--b--\r\n", {"content-type": "multipart/form-data; boundary=b"}, 400, "no part called"),
    ],
)
def test_uploads_that_are_no_forms(
    server: RunningServer, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    response = server.http.post("/v1/files", content=body, headers=headers)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def test_uploads_that_are_refused(server: RunningServer) -> None:
    def message(content: bytes, status: int, headers: Any = None, **fields: str) -> str:
        response = server.http.post(
            "/v1/files", files={"file": content}, data=fields, headers=headers
        )
        assert response.status_code == status
        return str(response.json()["error"]["message"])

    assert "larger than 50000 bytes" in message(b"x" * 60_000, 413, purpose="batch")
    assert "larger than" in message(b"x" * 300_000, 413, purpose="batch")
    assert "purpose must be batch" in message(b"x", 400, purpose="fine-tune")
    assert "no parameter 'color'" in message(b"x", 400, purpose="batch", color="red")
    strange = {"origin": "http://evil.example"}
    assert "may not upload" in message(b"x", 400, strange, purpose="batch")
    short = {"purpose": "batch", "expires_after[seconds]": "5"}
    assert "at least 3600 seconds" in message(b"x", 400, **short)
    anchored = {"purpose": "batch", "expires_after[anchor]": "last_used"}
    assert "counts from created_at" in message(b"x", 400, **anchored)
    uploads = Path(str(server.service.settings.batches.directory)) / "uploads"
    assert list(uploads.iterdir()) == []


def test_our_own_client(server: RunningServer, tmp_path: Path) -> None:
    """`fledge regenerate --batch` against `fledge serve`."""
    source = make_source(tmp_path / "conversations", simple_rows(8))
    settings = RegenerateSettings(max_tokens=5, timeout_s=60.0)
    answerer = BatchAnswerer(
        Endpoint.parse(server.url, KEY),
        MODEL,
        settings,
        SilentProgress(),
        polling=Polling(first_s=0.1, longest_s=0.2),
    )
    regenerate(source, tmp_path / "out", settings, answerer, progress=SilentProgress())
    text = b"".join(output_bytes(tmp_path / "out").values())
    assert text.count(b"\n") == 8
