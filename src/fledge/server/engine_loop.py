"""The engine's side of the server: takes orders between passes, tells what each pass brought.

One thread steps the engine; orders reach it through a queue. All pieces of a pass travel in one
message, so that the server wakes once for all its streams.
"""

import logging
import queue
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from fledge.contracts.errors import FledgeError
from fledge.engine.engine import Engine
from fledge.engine.sequence import Sequence
from fledge.server.grammar_lane import GrammarLane, refusal_of
from fledge.server.wire import (
    Cancel,
    Compiled,
    Finish,
    Order,
    Piece,
    Refusal,
    Report,
    Submit,
    TokenOrigin,
)

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""An idle engine is heard of at least so often."""

_STATS_S = 0.25
_MAX_FAILURES = 3
"""Passes in a row that may fail before the engine is taken for broken."""


class EngineBrokenError(Exception):
    """The engine cannot go on in this process."""


class _Live:
    """A request that somebody waits for."""

    __slots__ = ("num_sent", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.num_sent = 0


class EngineLoop:
    """Steps an engine while there is work, and sleeps while there is none."""

    def __init__(
        self, engine: Engine, orders: "queue.SimpleQueue[Order]", send: Callable[[Report], None]
    ) -> None:
        self._engine, self._orders, self._send = engine, orders, send
        self._live: dict[int, _Live] = {}
        self._grammars = GrammarLane(engine.grammars, orders)
        self._refusals: list[Refusal] = []
        self._num_failures = 0
        self._told = 0.0

    def run(self) -> NoReturn:
        """Serve for ever, or until the engine is broken."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take the orders that are there, make one pass if there is work, tell what it brought."""
        self._take_orders()
        self._refusals += self._grammars.overdue()
        had_work = self._engine.has_work
        if had_work:
            self._step()
        self._tell(has_come_to_rest=had_work and not self._engine.has_work)

    def _take_orders(self) -> None:
        """All orders that are there; the first is waited for while nothing else is to do."""
        has_work = self._engine.has_work or bool(self._refusals)
        while True:
            try:
                order = self._orders.get(block=not has_work, timeout=HEARTBEAT_S)
            except queue.Empty:
                return
            has_work = True
            if isinstance(order, Cancel):
                self._cancel(order)
            elif isinstance(order, Compiled):
                self._submit_compiled(order)
            elif self._grammars.must_compile(order):
                self._grammars.compile(order)
            else:
                self._submit(order)

    def _submit(self, order: Submit) -> None:
        try:
            request = self._engine.make_request(order.prompt_token_ids, order.params)
            seq = self._engine.add(request, client=order.client, priority=order.priority)
            self._live[order.number] = _Live(seq)
        except FledgeError as error:
            self._refusals.append(Refusal(order.number, str(error), True))
        except Exception as error:  # whatever is wrong with one request is no reason to leave
            _log.exception("a request could not be taken")
            self._refusals.append(Refusal(order.number, f"unexpected {error!r}", False))

    def _submit_compiled(self, compiled: Compiled) -> None:
        order = self._grammars.take(compiled.number)
        if order is not None and compiled.error is not None:
            self._refusals.append(refusal_of(order, compiled.error))
        elif order is not None:
            self._submit(order)

    def _cancel(self, order: Cancel) -> None:
        self._grammars.forget(order.numbers)
        gone = [self._live.pop(number) for number in order.numbers if number in self._live]
        self._engine.abort([live.seq for live in gone])
        self._told = 0.0  # whoever looks at the figures sees at once that they are gone

    def _step(self) -> None:
        try:
            self._engine.step()
            self._num_failures = 0
        except Exception as error:
            _log.exception("a pass failed; its requests were dropped")
            self._num_failures += 1
            self._tell(has_come_to_rest=False)
            if self._num_failures >= _MAX_FAILURES or not self._is_device_alive():
                raise EngineBrokenError(f"{type(error).__name__}: {error}") from error

    def _is_device_alive(self) -> bool:
        """After some faults a GPU answers nothing any more, whatever it is asked."""
        try:
            return torch.ones(1, device=self._engine.target.device).item() == 1.0
        except Exception:
            return False

    def _tell(self, *, has_come_to_rest: bool) -> None:
        events, self._refusals = [*self._refusals, *self._fresh_events()], []
        now = time.monotonic()
        is_due = has_come_to_rest or now - self._told >= _STATS_S
        if events or is_due:
            self._send(Report(events, self._engine.stats if is_due else None))
        if is_due:
            self._told = now

    def _fresh_events(self) -> list[Piece | Refusal]:
        events: list[Piece | Refusal] = []
        for number, live in list(self._live.items()):
            seq = live.seq
            if seq.error is not None:
                events.append(Refusal(number, str(seq.error), False))
            elif len(seq.output_ids) == live.num_sent:
                continue
            else:
                piece = self._piece(number, live)
                # Tokens without text wait for the next piece: half a character is nothing to send.
                if piece is None:
                    continue
                events.append(piece)
            if seq.has_ended:
                del self._live[number]
        return events

    def _piece(self, number: int, live: _Live) -> Piece | None:
        seq = live.seq
        text = seq.take_new_text()
        if not text and not seq.is_finished:
            return None
        finish = None
        if seq.is_finished:
            completion = seq.completion()
            finish = Finish(completion.finish_reason, completion.stats)
        start, live.num_sent = live.num_sent, len(seq.output_ids)
        logprobs = tuple(seq.logprobs[start:]) if seq.request.params.logprobs is not None else None
        origins = None
        if seq.request.params.draft_depths:
            texts, depths = seq.token_texts(start, text), seq.draft_depths[start:]
            origins = tuple(map(TokenOrigin, texts, depths))
        return Piece(number, text, tuple(seq.output_ids[start:]), logprobs, finish, origins)
