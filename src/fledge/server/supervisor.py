"""Keeps an engine process running, and knows who waits for which of its answers.

    loading ──> ready ──> restarting ──> loading ...       stopped
        └──> failed: it never ran and never will (a wrong path, too little memory)

When the process dies, everyone who waits is told at once, and a new one is started; the pauses
between attempts double while they fail.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from fledge.contracts.errors import FledgeError
from fledge.contracts.outputs import EngineStats
from fledge.contracts.sampling import SamplingParams
from fledge.server.answers import Answers
from fledge.server.api_errors import (
    ApiError,
    FailedRequestError,
    InvalidRequestError,
    UnavailableError,
)
from fledge.server.engine_link import EngineLink
from fledge.server.wire import (
    Cancel,
    EngineChoice,
    EngineFacts,
    LoadFailure,
    News,
    Note,
    Piece,
    Ready,
    Refusal,
    Report,
    Submit,
)

_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "failed", "stopped"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_STABLE_S = 60.0
"""An engine that ran so long before it died is started again at once."""


class EngineSupervisor:
    """The engine, as the rest of the server knows it."""

    def __init__(
        self,
        choice: EngineChoice,
        *,
        stall_s: float,
        on_loaded: Callable[[EngineFacts], Awaitable[None]],
    ) -> None:
        """`on_loaded` prepares the server for a loaded engine before anyone may ask it."""
        self.choice = choice
        self.state: State = "loading"
        self.facts: EngineFacts | None = None
        self.stats: EngineStats | None = None
        self.failure: LoadFailure | None = None
        """Why the engine cannot be had at all."""

        self.num_restarts = 0
        self.was_ready = asyncio.Event()
        """The engine could be asked once; it may be restarting since."""

        self.ended = asyncio.Event()
        """There is no engine, and there will be none."""

        self._stopping = asyncio.Event()
        self._stall_s = stall_s
        self._on_loaded = on_loaded
        self._link: EngineLink | None = None
        self._waiting: dict[int, Answers] = {}
        self._num_submitted = 0
        self._task: asyncio.Task[None] | None = None
        self._loaded_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the engine process; whoever still waits is told."""
        was_ready = self.state == "ready"
        if self.state != "failed":
            self.state = "stopped"
        self.fail_all(UnavailableError("the server is shutting down; ask another one."))
        self._stopping.set()
        if self._link is not None and was_ready:
            self._link.close()
        elif self._link is not None:
            self._link.kill()  # while it loads it listens to nobody
        if self._task is not None:
            await self._task

    @property
    def num_waiting(self) -> int:
        """Answers that somebody waits for."""
        return len(self._waiting)

    @property
    def num_pressing(self) -> int:
        """Those of them that are not lines of a batch, which give way to everyone."""
        return sum(answers.priority >= 0 for answers in self._waiting.values())

    @property
    def process_id(self) -> int | None:
        return self._link.process_id if self._link is not None else None

    def submit(
        self,
        prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        client: str,
        priority: int = 0,
    ) -> Answers:
        """Ask for one answer to each prompt."""
        self.require_ready()
        first = self._num_submitted
        self._num_submitted += len(prompts)
        numbers = range(first, self._num_submitted)
        answers = Answers(numbers, self._release, priority)
        link = self._link
        assert link is not None
        for number, (token_ids, params) in zip(numbers, prompts, strict=True):
            self._waiting[number] = answers
            link.send(Submit(number, token_ids, params, client, priority))
        return answers

    def require_ready(self) -> None:
        if self.state != "ready":
            raise UnavailableError(
                f"the engine is not ready (it is {self.state}); ask again later.",
                retry_after_s=5,
            )

    def _release(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more; the engine forgets those it has not finished."""
        left = tuple(number for number in numbers if self._waiting.pop(number, None) is not None)
        if left and self._link is not None:
            self._link.send(Cancel(left))

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        except Exception as error:
            _log.exception("the engine process cannot be looked after")
            self.failure = LoadFailure(f"the engine cannot be started: {error}", 1)
            self.state = "failed"
        finally:
            self.ended.set()

    async def _keep_running(self) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            ending = await self._run_once()
            if self._stopping.is_set():
                break
            if self.facts is None and self.failure is not None:
                self.state = "failed"
                break
            self.num_restarts += 1
            self.state = "restarting"
            is_stable = time.monotonic() - started > _STABLE_S
            pause_s = 0.0 if is_stable else min(2 * pause_s + _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            _log.error("the engine process %s; starting it again in %.1f s", ending, pause_s)
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _run_once(self) -> str:
        """One engine process from its start to its end; says how it ended."""
        self.failure = None
        link = self._link = EngineLink(self._on_news)
        await link.start(self.choice)
        while not await link.wait_closed(1.0):
            if self.state == "ready" and link.silent_s > self._stall_s:
                _log.error("the engine was silent for %.0f s and is ended", link.silent_s)
                link.kill()
        self._link = None
        if self.state == "ready":
            self.state = "restarting"
        self.fail_all(
            UnavailableError(
                "the engine stopped while it was answering; it is being started again. Ask again.",
                retry_after_s=5,
            )
        )
        if self._loaded_task is not None:
            self._loaded_task.cancel()
        return await link.reap()

    def _on_news(self, news: News) -> None:
        if isinstance(news, Report):
            for event in news.events:
                self._deliver(event)
            self.stats = news.stats or self.stats
        elif isinstance(news, Note):
            _log.log(news.level, "%s", news.text)
        elif isinstance(news, Ready):
            self._loaded_task = asyncio.create_task(self._become_ready(news.facts))
        else:
            _log.error("the engine could not be loaded: %s", news.message)
            self.failure = news

    async def _become_ready(self, facts: EngineFacts) -> None:
        try:
            await self._on_loaded(facts)
        except FledgeError as error:
            self._on_news(LoadFailure(str(error), error.exit_code))
            if self._link is not None:
                self._link.kill()
            return
        self.facts = facts
        if not self._stopping.is_set():
            self.state = "ready"
            self.was_ready.set()
            _log.info(
                "the engine is ready: process %d, %s on %s, room for %d tokens",
                facts.process_id,
                facts.dtype,
                facts.device,
                facts.max_tokens,
            )

    def _deliver(self, event: Piece | Refusal) -> None:
        if isinstance(event, Piece):
            is_last = event.finish is not None
            waiting = self._waiting
            answers = waiting.pop(event.number, None) if is_last else waiting.get(event.number)
            if answers is not None:
                answers.put(event)
            return
        answers = self._waiting.pop(event.number, None)
        if answers is not None:
            kind = InvalidRequestError if event.is_clients_fault else FailedRequestError
            answers.fail(kind(event.message, param=event.param))

    def fail_all(self, error: ApiError) -> None:
        """Tell everyone who waits."""
        waiting, self._waiting = self._waiting, {}
        for answers in set(waiting.values()):
            answers.fail(error)
