"""Asks through the Batch API: hand in files of questions, wait, read the answers.

What was handed in is written to the journal before and after each step, so that after a kill at any
moment the same batches are waited for and no row is handed in twice:

    file written ─> uploaded ─> journal: file_id ─> batch started ─> journal: batch_id
         ─> over ─> results read, each row into the journal ─> journal: is_closed

Rows that a batch did not answer, and the next turns of those that it did, go into further batches.
"""

import asyncio
from array import array
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.errors import ConfigError, FetchError
from fledge.contracts.progress import Progress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.batch_api import (
    Batch,
    BatchResult,
    fetch_results,
    look_at_batch,
    read_results,
    start_batch,
    upload_requests,
)
from fledge.data.regenerate.batch_files import (
    FileLimits,
    OpenBatch,
    open_batches,
    parse_custom_id,
    requests_file,
    rows_in,
    write_requests,
)
from fledge.data.regenerate.calls import HOPELESS, Caller, is_passing
from fledge.data.regenerate.chat_api import read_reply, route_of
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import Backoff, BadDocument, Refused, Unanswered
from fledge.data.regenerate.url_answerer import limits_of, raise_first
from fledge.data.regenerate.worklist import Worklist

_FRUITLESS_BATCHES = 2
"""So many batches that answered none of their rows: the server does not answer these."""

_KEPT = "What was handed in is kept; run the same command again to go on."


@dataclass(frozen=True, slots=True)
class Polling:
    """How often to look whether a batch is over: ever more seldom."""

    first_s: float = 2.0
    longest_s: float = 60.0
    growth: float = 1.5


class BatchAnswerer:
    """Keeps every open row in exactly one batch."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        settings: RegenerateSettings,
        progress: Progress,
        backoff: Backoff | None = None,
        polling: Polling | None = None,
        file_limits: FileLimits | None = None,
    ) -> None:
        self.model = model
        self.device = "remote"
        self.identity = {"model": model}
        self._endpoint = endpoint
        self.settings = settings
        self.progress = progress
        self._limits = limits_of(settings, backoff)
        self.polling = polling or Polling()
        self.file_limits = file_limits or FileLimits()

    def answer(self, worklist: Worklist) -> None:
        """Answer every open row; those without an answer are postponed."""
        try:
            asyncio.run(self._answer(worklist))
        except BaseExceptionGroup as group:
            try:
                raise_first(group)
            except Unanswered as error:
                raise FetchError(f"no answer from {error}. {_KEPT}") from error
            except Refused as error:
                raise FetchError(
                    f"the server refuses to take a batch ({error}). {_KEPT}"
                ) from error

    async def _answer(self, worklist: Worklist) -> None:
        async with Caller(self._endpoint, self._limits, self.progress) as caller:
            run = _BatchRun(self, caller, worklist)
            async with asyncio.TaskGroup() as group:
                run.start(group)


class _BatchRun:
    """The batches of one run; each set of rows is followed by a task of its own."""

    def __init__(self, way: BatchAnswerer, caller: Caller, worklist: Worklist) -> None:
        self._way = way
        self._caller = caller
        self._worklist = worklist
        self._number = max((record["number"] for record in worklist.batches), default=0)
        self._num_waiting = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        """Wait for batches of earlier runs, and hand in what is in none."""
        self._group = group
        is_handed_in = bytearray(len(self._worklist))
        for batch in open_batches(self._worklist.batches):
            rows = rows_in(self._file(batch.number))
            for row in rows:
                is_handed_in[row] = True
            group.create_task(self._adopt(batch, rows))
        pending = (dialogue.row for dialogue in self._worklist.pending())
        group.create_task(self._follow(array("q", (r for r in pending if not is_handed_in[r]))))

    def _file(self, number: int) -> Path:
        return requests_file(self._worklist.directory, number)

    async def _adopt(self, batch: OpenBatch, rows: "array[int]") -> None:
        """Go on with a batch that an earlier run handed in."""
        end = await self._finish(batch, rows, is_new=False)
        await self._follow(end.rows_left)

    async def _follow(self, rows: "array[int]") -> None:
        """One batch after the other over these rows, until none of them is open."""
        num_fruitless = 0
        while rows:
            self._number += 1
            number = self._number
            file = self._file(number)
            written, left = write_requests(
                file,
                rows,
                self._worklist,
                self._way.settings,
                self._way.model,
                self._way.file_limits,
            )
            if left:
                self._group.create_task(self._follow(left))
            if not written:
                file.unlink()
                return
            file_id = await upload_requests(self._caller, file)
            self._worklist.note_batch({"number": number, "file_id": file_id})
            end = await self._finish(OpenBatch(number, file_id), written, is_new=True)
            rows = end.rows_left
            if not end.is_fruitless:
                num_fruitless = 0
                continue
            # A batch is refused as a whole while too much else of ours is waiting.
            num_fruitless += not (end.is_refused and self._num_waiting)
            if num_fruitless >= _FRUITLESS_BATCHES:
                self._postpone(rows, end.reason)
                return
            await asyncio.sleep(self._way.polling.longest_s)

    async def _finish(self, batch: OpenBatch, rows: "array[int]", *, is_new: bool) -> "_BatchEnd":
        """Wait until a batch is over and read what came of it."""
        if batch.batch_id is None:
            route = route_of(self._way.settings)
            batch.batch_id = await start_batch(self._caller, batch.file_id, route, is_new=is_new)
            self._worklist.note_batch({"number": batch.number, "batch_id": batch.batch_id})
        self._way.progress.note(f"batch {batch.batch_id}: {len(rows):,} questions handed in")
        self._num_waiting += 1
        try:
            state = await self._wait(batch.batch_id)
        finally:
            self._num_waiting -= 1
        file = self._file(batch.number)
        results = file.with_name(f"{file.name}.results")
        name = f"batch {state.id}"
        num_settled, reason = 0, f"{name}: {state.errors or f'it ended as {state.status}'}"
        for file_id in state.result_file_ids:
            await fetch_results(self._caller, file_id, results)
            for result in read_results(results):
                is_settled = self._settle(result)
                num_settled += is_settled
                reason = reason if is_settled else f"{name}: {result.reason}"
        rows_left = array("q", (row for row in rows if self._worklist.is_open(row)))
        self._worklist.note_batch({"number": batch.number, "is_closed": True})
        results.unlink(missing_ok=True)
        file.unlink()
        return _BatchEnd(rows_left, not num_settled, state.status == "failed", reason)

    async def _wait(self, batch_id: str) -> Batch:
        pause_s = self._way.polling.first_s
        while True:
            batch = await look_at_batch(self._caller, batch_id)
            if batch.is_over:
                return batch
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * self._way.polling.growth, self._way.polling.longest_s)

    def _settle(self, result: BatchResult) -> bool:
        """Take one result; False when its row must be asked again."""
        row, turn = parse_custom_id(result.custom_id)
        if not 0 <= row < len(self._worklist) or not self._worklist.is_open(row):
            return True  # none of ours, or read before we were killed
        dialogue = self._worklist.dialogue(row)
        question = dialogue.question
        if question is None or question.turn != turn:
            return True
        if result.status in HOPELESS:
            raise ConfigError(f"the requests of a batch were answered {result.reason}.")
        if result.status == 200:
            try:
                self._worklist.record(dialogue, read_reply(result.body))
            except BadDocument:
                return False
            return True
        if result.status == 0 or is_passing(result.status):
            return False
        self._worklist.fail(dialogue, result.reason)
        return True

    def _postpone(self, rows: "array[int]", reason: str) -> None:
        for row in rows:
            dialogue = self._worklist.dialogue(row)
            self._worklist.postpone(dialogue, reason, is_reachable=True)


@dataclass(frozen=True, slots=True)
class _BatchEnd:
    """How a batch ended."""

    rows_left: "array[int]"
    is_fruitless: bool
    is_refused: bool
    reason: str
