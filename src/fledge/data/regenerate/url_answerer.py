"""Asks an OpenAI-compatible URL, many questions at a time."""

import asyncio
from collections.abc import Iterator
from typing import Any, NoReturn

from fledge.contracts.errors import ConfigError, FetchError
from fledge.contracts.progress import Progress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.batch_files import open_batches
from fledge.data.regenerate.calls import Caller, CallLimits
from fledge.data.regenerate.chat_api import body_of, read_reply, route_of
from fledge.data.regenerate.dialogue import Dialogue
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import Backoff, BadDocument, Refused, Unanswered
from fledge.data.regenerate.worklist import Worklist

_ROWS_PER_SLOT = 2
"""Rows under way for each request in flight: those in a pause leave their slot to others."""


class UrlAnswerer:
    """Keeps `concurrency` requests in flight until no row is open."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        settings: RegenerateSettings,
        progress: Progress,
        backoff: Backoff | None = None,
    ) -> None:
        self.model = model
        self.device = "remote"
        self.identity = {"model": model}
        self._endpoint = endpoint
        self._settings = settings
        self._progress = progress
        self._limits = limits_of(settings, backoff)

    def answer(self, worklist: Worklist) -> None:
        """Ask about every open row; those without an answer are postponed."""
        num_batches = len(open_batches(worklist.batches))
        if num_batches:
            raise ConfigError(
                f"{num_batches} batches of an earlier run with --batch are still with the server; "
                "collect them with --batch, or choose another directory."
            )
        try:
            asyncio.run(self._answer(worklist))
        except BaseExceptionGroup as group:
            raise_first(group)

    async def _answer(self, worklist: Worklist) -> None:
        dialogues = worklist.pending()
        async with (
            Caller(self._endpoint, self._limits, self._progress) as caller,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._settings.concurrency * _ROWS_PER_SLOT):
                group.create_task(self._work(caller, dialogues, worklist))

    async def _work(
        self, caller: Caller, dialogues: Iterator[Dialogue], worklist: Worklist
    ) -> None:
        """One of many tasks that share the iterator."""
        for dialogue in dialogues:
            try:
                await self._converse(caller, dialogue, worklist)
            except Refused as error:
                worklist.fail(dialogue, str(error))
            except Unanswered as error:
                worklist.postpone(dialogue, str(error), is_reachable=error.is_reachable)

    async def _converse(self, caller: Caller, dialogue: Dialogue, worklist: Worklist) -> None:
        route = route_of(self._settings)
        while (question := dialogue.question) is not None:
            body = body_of(question, self._settings, self.model)
            worklist.record(dialogue, await caller.post(route, body, read_reply))


def limits_of(settings: RegenerateSettings, backoff: Backoff | None) -> CallLimits:
    return CallLimits(
        concurrency=settings.concurrency,
        retries=settings.retries,
        timeout_s=settings.timeout_s,
        backoff=backoff or Backoff(),
    )


def find_model(
    endpoint: Endpoint,
    settings: RegenerateSettings,
    progress: Progress,
    backoff: Backoff | None = None,
) -> str:
    """The name of the first model that a server lists."""

    async def ask() -> str | None:
        async with Caller(endpoint, limits_of(settings, backoff), progress) as caller:
            return await caller.get("/models", _first_id)

    try:
        model = asyncio.run(ask())
    except (Refused, Unanswered) as error:
        raise FetchError(f"no answer from {error}.") from error
    if model is None:
        raise ConfigError(f"{endpoint.url}/models lists no model; name one with --model.")
    return model


def _first_id(document: Any) -> str | None:
    models = document.get("data") if isinstance(document, dict) else None
    if not isinstance(models, list):
        raise BadDocument("no list of models")
    ids = [model.get("id") for model in models if isinstance(model, dict)]
    return next((name for name in ids if isinstance(name, str) and name), None)


def raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """The first error of tasks that ran together; the others were cancelled because of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error from None
