"""One batch from its first look at the file to its results.

    validating ──> in_progress ──> finalizing ──> completed | expired
        └──> failed     └──> cancelling ──> cancelled

Every step is on disk before the next begins, and each can be repeated: a server that is started
after a kill goes on with what was not finished.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice

from starlette.types import ASGIApp

from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_keys import Caller
from fledge.server.batch_lines import Line, check_lines, read_lines
from fledge.server.batch_records import BatchRecord, Ending, StoredFile
from fledge.server.batch_results import BatchResults, answered, unasked
from fledge.server.batch_store import BatchStore
from fledge.server.inner_calls import InnerAnswer, ask
from fledge.server.service import Service

_log = logging.getLogger(__name__)

_LINES_AT_ONCE = 64
_COMMIT_S = 1.0
_TICK_S = 0.2
_FULL_DISK_PAUSE_S = 10.0
_MAX_CRASHES = 3
"""A line that the engine did not survive so often is given up."""

_LEFT = {
    "expired": ("batch_expired", "the request was not made before the completion window closed."),
    "cancelled": ("batch_cancelled", "the request was not made before the batch was cancelled."),
}


class BatchRun:
    """Works on one batch; cancelling its task leaves everything as a kill would."""

    def __init__(
        self,
        record: BatchRecord,
        store: BatchStore,
        service: Service,
        app: ASGIApp,
        slots: asyncio.Semaphore,
    ) -> None:
        self._record, self._store, self._service = record, store, service
        self._app, self._slots = app, slots
        self._caller = Caller(f"batch {record.owner[:8]}", record.owner)
        self._input = store.data_path(record.input_file_id)
        self._is_cancelled = asyncio.Event()

    def cancel(self) -> None:
        self._is_cancelled.set()

    async def run(self) -> None:
        record = self._record
        if record.status == "validating" and not await self._is_valid():
            return
        output = self._store.data_path(record.output_name)
        errors = self._store.data_path(record.error_name)
        results = await asyncio.to_thread(BatchResults, record, output, errors)
        try:
            committer = asyncio.create_task(_commit_often(results))
            try:
                if record.ending is None:
                    record.ending = await self._work(results)
                await self._finish(results, record.ending)
            finally:
                committer.cancel()
        finally:
            await asyncio.to_thread(results.close)
        _log.info(
            "batch %s is %s: %d answers, %d errors",
            record.id,
            record.status,
            record.num_completed,
            record.num_failed,
        )

    async def _is_valid(self) -> bool:
        record = self._record
        check = await asyncio.to_thread(
            check_lines,
            self._input,
            record.endpoint,
            max_lines=self._store.settings.max_lines,
            max_line_bytes=self._service.settings.max_body_bytes,
        )
        if record.status != "validating":  # cancelled meanwhile
            return True
        if check.errors:
            record.errors = check.errors
            record.reach("failed", time.time())
        else:
            record.num_total = check.num_lines
            record.reach("in_progress", time.time())
        await self._store.save(record)
        return not check.errors

    async def _work(self, results: BatchResults) -> Ending:
        """Answer lines until all are answered, or there is a reason to stop."""
        work = asyncio.create_task(self._answer_all(results))
        stop = asyncio.create_task(self._is_cancelled.wait())
        left_s = max(0.0, self._record.expires_at - time.time())
        try:
            await asyncio.wait((work, stop), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "completed"
            return "cancelled" if stop.done() else "expired"
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.wait((work,))

    async def _answer_all(self, results: BatchResults) -> None:
        async with asyncio.TaskGroup() as group:
            async for line in self._open_lines(results):
                await self._slots.acquire()
                task = group.create_task(self._answer(line, results))
                # Not in the task: one that is cancelled before it begins runs no `finally`.
                task.add_done_callback(lambda _: self._slots.release())

    async def _open_lines(self, results: BatchResults) -> AsyncIterator[Line]:
        """The lines without a result, read a few at a time."""
        lines = self._lines()
        while some := await asyncio.to_thread(lambda: list(islice(lines, _LINES_AT_ONCE))):
            for line in some:
                if not results.is_done(line.custom_id):
                    yield line

    def _lines(self) -> Iterator[Line]:
        limit = self._service.settings.max_body_bytes
        return read_lines(self._input, self._record.endpoint, max_line_bytes=limit)

    async def _answer(self, line: Line, results: BatchResults) -> None:
        answer = await self._ask(line)
        result = answered(line.custom_id, answer.request_id, answer.status, answer.body)
        while True:
            try:
                results.add(result)
                return
            except OSError as error:
                _log.error("a result of batch %s cannot be written: %s", self._record.id, error)
            await asyncio.sleep(_FULL_DISK_PAUSE_S)

    async def _ask(self, line: Line) -> InnerAnswer:
        """The answer to a line, by as many engines as it takes."""
        if line.body.get("stream"):
            error = InvalidRequestError(
                "a line of a batch cannot be streamed; leave stream out.", param="stream"
            )
            return InnerAnswer(secrets.token_hex(12), error.status, error.body)
        num_crashes = 0
        while True:
            await self._until_ready()
            answer = await ask(self._app, self._record.endpoint, line.body, self._caller)
            if answer.status != 503:
                return answer
            if self._service.status != "ready":
                num_crashes += not self._service.is_draining
                if num_crashes >= _MAX_CRASHES:
                    return answer
            await asyncio.sleep(_TICK_S)

    async def _until_ready(self) -> None:
        while self._service.status != "ready":
            await asyncio.sleep(_TICK_S)

    async def _finish(self, results: BatchResults, ending: Ending) -> None:
        """Say of every line what became of it, and let the results be seen."""
        record = self._record
        if ending == "cancelled":
            record.reach("cancelling", time.time())
        else:
            record.reach("finalizing", time.time())
        await self._store.save(record)
        if ending != "completed" and record.num_total:  # otherwise nobody looked at the lines
            async for line in self._open_lines(results):
                results.add(unasked(line.custom_id, *_LEFT[ending]))
        await asyncio.to_thread(results.commit)
        now = time.time()
        if results.has_answers:
            await self._publish(record.output_name, "output", results.sizes[0], now)
            record.output_file_id = record.output_name
        if results.has_errors:
            await self._publish(record.error_name, "error", results.sizes[1], now)
            record.error_file_id = record.error_name
        record.reach(ending, now)
        await self._store.save(record)
        await asyncio.to_thread(self._store.remove_empty_results, record)

    async def _publish(self, name: str, kind: str, num_bytes: int, now: float) -> None:
        record = self._record
        await self._store.publish(
            StoredFile(
                id=name,
                owner=record.owner,
                filename=f"{record.id}_{kind}.jsonl",
                purpose="batch_output",
                num_bytes=num_bytes,
                created_at=int(now),
                expires_at=int(now) + record.keep_results_s,
            )
        )


async def _commit_often(results: BatchResults) -> None:
    while True:
        await asyncio.sleep(_COMMIT_S)
        try:
            await asyncio.to_thread(results.commit)
        except OSError as error:
            _log.error("results cannot be written to the disk: %s", error)
