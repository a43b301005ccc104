"""Batches around an endpoint of our own: crashes, kills, cancels and full disks at any moment."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.batch_settings import BatchSettings
from fledge.contracts.server_settings import ServeSettings
from fledge.server import batch_run
from fledge.server.batch_records import BatchRecord
from fledge.server.batch_runner import BatchRunner
from fledge.server.service import Service
from tests.unit.server.test_batch_files import a_batch, a_file, answer_of, put
from tests.unit.server.test_service import CHOICE, FACTS


class Endpoint:
    """Answers lines as an application would; `mishaps` says what goes wrong with which prompt."""

    def __init__(self, service: Service, mishaps: dict[str, str] | None = None) -> None:
        self._service, self._mishaps = service, mishaps or {}
        self.asked: Counter[str] = Counter()
        self.most_at_once = self.num_now = 0
        self.is_held = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[prompt] += 1
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            await asyncio.sleep(0.001)
            while self.is_held:
                await asyncio.sleep(0.001)
        finally:
            self.num_now -= 1
        mishap = self._mishaps.get(prompt)
        if mishap == "fault":
            raise RuntimeError("a fault of ours")
        status = 200
        if mishap == "crash":
            status, self._service.supervisor.state = 503, "restarting"
            asyncio.get_running_loop().call_later(0.002, self._restart)
        body = answer_of(prompt)["response"]["body"] if status == 200 else {"error": {}}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def _restart(self) -> None:
        self._service.supervisor.state = "ready"


@asynccontextmanager
async def running(directory: Path, **mishaps: str) -> AsyncIterator[tuple[Any, Endpoint, Any]]:
    settings = BatchSettings(directory=str(directory), concurrency=3)
    service = Service(CHOICE, ServeSettings(batches=settings))
    service.open_batches()
    service.supervisor.state, service.supervisor.facts = "ready", FACTS
    endpoint = Endpoint(service, mishaps)
    runner = BatchRunner(service.batch_store, service, endpoint)
    runner.start()
    try:
        yield service.batch_store, endpoint, runner
    finally:
        await runner.stop()


async def hand_in(store: Any, runner: BatchRunner, custom_ids: str, **fields: Any) -> BatchRecord:
    lines = [
        {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {"prompt": one}}
        for one in custom_ids
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await put(store, a_file(), content)
    batch = a_batch(file.id, **fields)
    await store.save(batch)
    runner.look()
    return batch


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def results_of(store: Any, file_id: str | None) -> dict[str, Any]:
    lines = store.data_path(file_id).read_bytes().splitlines()
    found = {json.loads(line)["custom_id"]: json.loads(line) for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_TICK_S", 0.001)
    monkeypatch.setattr(batch_run, "_FULL_DISK_PAUSE_S", 0.01)


async def let_it_work_a_little(batch: BatchRecord, endpoint: Endpoint) -> None:
    before = batch.num_completed
    await until(lambda: batch.num_completed > before or batch.is_over)
    endpoint.is_held = True
    # Few may be left by now: then all of them are being answered.
    await until(lambda: endpoint.num_now >= min(3, num_left(batch)) or batch.is_over)


def num_left(batch: BatchRecord) -> int:
    return batch.num_total - batch.num_completed - batch.num_failed


def test_a_stopped_server_goes_on(tmp_path: Path) -> None:
    """Again and again; only what was being answered is asked again."""

    async def work() -> None:
        asked: Counter[str] = Counter()
        batch_id = ""
        for _ in range(4):
            async with running(tmp_path) as (store, endpoint, runner):
                if not batch_id:
                    batch_id = (await hand_in(store, runner, "abcdefghijklmnop")).id
                batch = store.batches[batch_id]
                await let_it_work_a_little(batch, endpoint)
                await runner.stop()
                asked += endpoint.asked
                assert endpoint.most_at_once <= 3
        async with running(tmp_path) as (store, endpoint, _):
            batch = store.batches[batch_id]
            await until(lambda: batch.is_over)
            asked += endpoint.asked
            assert (batch.status, batch.num_completed, batch.num_total) == ("completed", 16, 16)
            assert set(results_of(store, batch.output_file_id)) == set("abcdefghijklmnop")
            assert batch.error_file_id is None
        assert set(asked) == set("abcdefghijklmnop")
        assert sum(asked.values()) <= 16 + 4 * 3

    asyncio.run(work())


def test_lines_that_the_engine_does_not_survive(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path, x="crash", y="fault") as (store, endpoint, runner):
            batch = await hand_in(store, runner, "abxyc")
            await until(lambda: batch.is_over)
            assert endpoint.asked["x"] == 3
            assert set(results_of(store, batch.output_file_id)) == set("abc")
            errors = results_of(store, batch.error_file_id)
            statuses = {one: errors[one]["response"]["status_code"] for one in errors}
            assert statuses == {"x": 503, "y": 500}

    asyncio.run(work())


def test_batches_take_turns(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path) as (store, endpoint, runner):
            endpoint.is_held = True
            batches = [await hand_in(store, runner, "abcdefgh") for _ in range(5)]
            other = await hand_in(
                store, runner, "xyz", owner="other", created_at=batches[0].created_at + 9
            )
            await until(lambda: len(runner._runs) == 4)
            endpoint.is_held = False
            await until(lambda: other.is_over)
            await until(lambda: all(batch.is_over for batch in batches))
            assert {batch.status for batch in batches} == {"completed"}
            assert endpoint.most_at_once <= 3

    asyncio.run(work())


def test_a_batch_cancelled_before_anyone_looked_at_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path) as (store, _, runner):
            batch = a_batch((await put(store, a_file(), b"no line")).id)
            await store.save(batch)
            await runner.cancel(batch)
            await until(lambda: batch.is_over)
            assert batch.status == "cancelled"
            assert batch.output_file_id is batch.error_file_id is None
            await runner.cancel(batch)
            assert batch.status == "cancelled"

    asyncio.run(work())


def test_a_batch_that_expired_while_nobody_served(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path) as (store, endpoint, runner):
            batch = await hand_in(store, runner, "ab", expires_at=1)
            await until(lambda: batch.is_over)
            assert batch.status == "expired"
            errors = results_of(store, batch.error_file_id)
            assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
            assert (batch.num_total, batch.num_failed) == (2, 2)

    asyncio.run(work())


def test_a_full_disk_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(28, "No space left on device")] * 3
    write = batch_run.BatchResults.add

    def add(self: Any, result: dict[str, Any]) -> None:
        if failures:
            raise failures.pop()
        write(self, result)

    monkeypatch.setattr(batch_run.BatchResults, "add", add)

    async def work() -> None:
        async with running(tmp_path) as (store, endpoint, runner):
            batch = await hand_in(store, runner, "abc")
            await until(lambda: batch.is_over)
            assert batch.num_completed == 3
            assert max(endpoint.asked.values()) == 1

    asyncio.run(work())


def test_a_server_without_a_directory_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    first, second = (Service(CHOICE, ServeSettings()) for _ in range(2))
    first.open_batches()
    second.open_batches()
    assert first.has_batches
    assert not second.has_batches
    with pytest.raises(Exception, match="another server keeps the files of its batches"):
        _ = second.batch_store
    first.batch_store.close()
