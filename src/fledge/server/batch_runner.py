"""Decides which batches are worked on; those that were unfinished at the last stop go on."""

import asyncio
import logging
import time
from collections import Counter

from starlette.types import ASGIApp

from fledge.server.batch_records import BatchRecord
from fledge.server.batch_run import BatchRun
from fledge.server.batch_store import BatchStore
from fledge.server.service import Service

_log = logging.getLogger(__name__)

MAX_RUNNING = 4
"""Batches at once; their lines take turns."""

_SWEEP_S = 600.0
_LOOK_S = 1.0
_FAILURE_PAUSE_S = 30.0


class BatchRunner:
    """Works on the batches of a store while the server runs."""

    def __init__(self, store: BatchStore, service: Service, app: ASGIApp) -> None:
        self._store, self._service, self._app = store, service, app
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._main = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop as a kill would: nothing finished is lost, and the next server goes on."""
        tasks = [*self._tasks, *([self._main] if self._main is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    def look(self) -> None:
        """There is a new batch."""
        self._wake.set()

    async def cancel(self, batch: BatchRecord) -> None:
        """End a batch; what is finished by now stays."""
        if batch.ending is not None or batch.is_over:
            return
        batch.ending = "cancelled"
        batch.reach("cancelling", time.time())
        await self._store.save(batch)
        if run := self._runs.get(batch.id):
            run.cancel()
        self.look()

    async def _run(self) -> None:
        while self._service.status != "ready":
            await asyncio.sleep(_LOOK_S / 5)
        facts = self._service.supervisor.facts
        assert facts is not None
        slots = asyncio.Semaphore(self._store.settings.concurrency or facts.max_requests)
        next_sweep = 0.0
        while True:
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + _SWEEP_S
                await self._sweep()
            while len(self._runs) < MAX_RUNNING and (batch := self._next()) is not None:
                self._begin(batch, slots)
            self._wake.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _sweep(self) -> None:
        try:
            await self._store.sweep()
        except OSError as error:
            _log.error("old files of batches cannot be removed: %s", error)

    def _next(self) -> BatchRecord | None:
        """The oldest batch of whoever has the fewest running."""
        running = Counter(self._store.batches[batch_id].owner for batch_id in self._runs)
        now = time.monotonic()
        waiting = [
            one
            for one in self._store.batches.values()
            if not one.is_over
            and one.id not in self._runs
            and self._not_before.get(one.id, 0.0) <= now
        ]
        return min(waiting, key=lambda one: (running[one.owner], one.created_at), default=None)

    def _begin(self, batch: BatchRecord, slots: asyncio.Semaphore) -> None:
        run = self._runs[batch.id] = BatchRun(batch, self._store, self._service, self._app, slots)
        task = asyncio.create_task(self._follow(batch, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, batch: BatchRecord, run: BatchRun) -> None:
        try:
            await run.run()
        except Exception:
            # A full disk, for example: what is written stays, and it is tried again.
            _log.exception("batch %s stopped and is tried again", batch.id)
            self._not_before[batch.id] = time.monotonic() + _FAILURE_PAUSE_S
        finally:
            del self._runs[batch.id]
            self._wake.set()
