"""What all requests of a server share: the engine, the tokenizer, the keys, the limits."""

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fledge.contracts.errors import ConfigError
from fledge.contracts.server_settings import ServeSettings
from fledge.server.api_errors import (
    BusyError,
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
)
from fledge.server.api_keys import ApiKeys
from fledge.server.batch_store import BatchStore
from fledge.server.metrics import Metrics
from fledge.server.parameters import Allowance, model_defaults
from fledge.server.prompts import PromptReader
from fledge.server.supervisor import EngineSupervisor
from fledge.server.terms import INTERACTIVE, Terms
from fledge.server.wire import EngineChoice, EngineFacts
from fledge.store.cache import CacheLayout, default_cache_dir

_log = logging.getLogger(__name__)

_SMOOTHING = 0.1
_LONGEST_RETRY_S = 60


class Service:
    """One server's parts, from start to end."""

    def __init__(self, choice: EngineChoice, settings: ServeSettings) -> None:
        self.settings = settings
        self.choice = choice
        file = Path(settings.api_keys_file) if settings.api_keys_file is not None else None
        self.keys = ApiKeys(file)
        self.supervisor = EngineSupervisor(
            choice, stall_s=settings.stall_s, on_loaded=self._on_loaded
        )
        self.metrics = Metrics(self.supervisor)
        self.model_names = settings.model_names or (default_model_name(choice.target),)
        self.created = int(time.time())
        self.is_draining = False
        self.num_open = 0
        """Requests whose response is not yet sent."""

        self._batch_store: BatchStore | None = None
        self._no_batches = "this server takes no files and batches."
        self._prompts: PromptReader | None = None
        self._allowance: Allowance | None = None
        self._num_preparing = 0
        self._mean_answer_s = 1.0

    @property
    def batch_store(self) -> BatchStore:
        if self._batch_store is None:
            raise UnavailableError(self._no_batches, code="batches_unavailable")
        return self._batch_store

    @property
    def has_batches(self) -> bool:
        return self._batch_store is not None

    def open_batches(self) -> None:
        """Take the directory of files and batches.

        One that was named must be usable. Where none was, the server does without when another
        server has it already, or when it cannot be written.
        """
        settings = self.settings.batches
        directory = settings.directory
        try:
            place = default_batch_dir(self.model_names[0]) if directory is None else Path(directory)
            self._batch_store = BatchStore(place, settings)
        except ConfigError as error:
            if directory is not None:
                raise
            self._no_batches = f"this server takes no files and batches: {error}"
            _log.warning("%s", self._no_batches)

    def start(self) -> None:
        self.supervisor.start()

    async def stop(self) -> None:
        await self.supervisor.stop()
        if self._prompts is not None:
            self._prompts.close()

    async def _on_loaded(self, facts: EngineFacts) -> None:
        if self._prompts is None:
            self._prompts = await asyncio.to_thread(PromptReader.load, facts.target_dir)
        self._allowance = Allowance(
            max_tokens=facts.max_tokens,
            max_prompt_tokens=self.settings.max_prompt_tokens,
            max_answer_tokens=self.settings.max_answer_tokens,
            defaults=model_defaults(facts.target_dir),
        )

    @property
    def status(self) -> str:
        return "draining" if self.is_draining else self.supervisor.state

    def require_ready(self) -> None:
        if self.is_draining:
            raise UnavailableError("the server is shutting down; ask another one.", retry_after_s=5)
        self.supervisor.require_ready()

    @property
    def prompts(self) -> PromptReader:
        self.require_ready()
        assert self._prompts is not None
        return self._prompts

    @property
    def allowance(self) -> Allowance:
        self.require_ready()
        assert self._allowance is not None
        return self._allowance

    def check_model(self, name: str) -> None:
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise UnknownModelError(
                f"there is no model {name!r} here; this server has {known}.", param="model"
            )

    @contextmanager
    def admit(self, num_answers: int, terms: Terms = INTERACTIVE) -> Iterator[None]:
        """Room for so many answers while their prompts are read; then the engine counts them.

        Lines of a batch have a limit of their own, and take no room from those who wait.
        """
        limit = self.settings.max_choices
        if num_answers > limit:
            raise InvalidRequestError(
                f"the request asks for {num_answers} answers and this server gives at most {limit} "
                "at once; lower n, or send fewer prompts.",
                param="n",
            )
        if terms.is_patient:
            yield
            return
        facts = self.supervisor.facts
        num_rows = facts.max_requests if facts is not None else 0
        num_busy = self.supervisor.num_pressing + self._num_preparing
        if num_busy + num_answers > num_rows + self.settings.max_queue:
            raise BusyError(
                f"the server is full: {num_busy} answers are being made or wait, and at most "
                f"{num_rows + self.settings.max_queue} may; ask again later.",
                retry_after_s=self._retry_after_s(num_busy, num_rows),
            )
        self._num_preparing += num_answers
        try:
            yield
        finally:
            self._num_preparing -= num_answers

    def note_duration(self, seconds: float) -> None:
        """An answer took so long: clients that are sent away learn when to come back."""
        self._mean_answer_s += _SMOOTHING * (seconds - self._mean_answer_s)

    def _retry_after_s(self, num_busy: int, num_rows: int) -> int:
        rounds = max(1.0, (num_busy - num_rows) / max(1, num_rows))
        return min(_LONGEST_RETRY_S, max(1, math.ceil(self._mean_answer_s * rounds)))


def default_model_name(target: str) -> str:
    """A built-in name or a hub id as it is; of a path, the last part."""
    path = Path(target).expanduser()
    return path.resolve().name if path.exists() else target


def default_batch_dir(model_name: str) -> Path:
    """Of its own for each name a server is known by, so that several share one cache."""
    plain = re.sub(r"[^\w.-]+", "-", model_name)[:40]
    mark = hashlib.sha256(model_name.encode()).hexdigest()[:8]
    return CacheLayout(default_cache_dir()).batches / f"{plain}-{mark}"
