"""Grammars are compiled beside the engine's loop: nobody's stream waits for somebody's schema."""

import logging
import queue
import threading
import time
from collections.abc import Iterable

from fledge.contracts.errors import FledgeError
from fledge.engine.engine import Engine
from fledge.engine.grammar import GrammarCompiler
from fledge.server.wire import Compiled, Order, Refusal, Submit

_log = logging.getLogger(__name__)

COMPILE_S = 10.0
"""A grammar that is not compiled after so long is given up."""

_NUM_THREADS = 2
"""One grammar that takes long does not hold up all others."""


def prepare_grammars(engine: Engine) -> None:
    """Tell the library the vocabulary while nobody waits for tokens yet."""
    if not engine.grammars.can_compile:
        return
    try:
        engine.grammars.prepare()
    except Exception as error:  # whoever asks for a grammar is told; everybody else is served
        _log.warning("answers cannot have grammars: %s", error)


class GrammarLane:
    """Requests whose grammars are being compiled."""

    def __init__(self, compiler: GrammarCompiler, orders: "queue.SimpleQueue[Order]") -> None:
        """What is compiled is told through `orders`."""
        self._compiler, self._orders = compiler, orders
        self._waiting: dict[int, tuple[Submit, float]] = {}
        self._work: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._has_threads = False

    def must_compile(self, order: Submit) -> bool:
        grammar = order.params.grammar
        return grammar is not None and not self._compiler.has_compiled(grammar)

    def compile(self, order: Submit) -> None:
        """Begin, and put a `Compiled` among the orders at the end."""
        self._waiting[order.number] = (order, time.monotonic())
        self._work.put(order)
        if not self._has_threads:
            self._has_threads = True
            for _ in range(_NUM_THREADS):
                threading.Thread(target=self._run, name="fledge-grammars", daemon=True).start()

    def take(self, number: int) -> Submit | None:
        """A request that waited; None when nobody wants it any more."""
        order, _ = self._waiting.pop(number, (None, 0.0))
        return order

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._waiting.pop(number, None)

    def overdue(self) -> list[Refusal]:
        """Requests whose grammars take too long; they wait no longer."""
        now = time.monotonic()
        late = [order for order, since in self._waiting.values() if now - since > COMPILE_S]
        self.forget(order.number for order in late)
        message = f"the grammar was not compiled within {COMPILE_S:g} s; make it simpler."
        return [refusal_of(order, message) for order in late]

    def _run(self) -> None:
        while True:
            order = self._work.get()
            if order.number in self._waiting:
                self._orders.put(Compiled(order.number, self._error_of(order)))

    def _error_of(self, order: Submit) -> str | None:
        assert order.params.grammar is not None
        try:
            self._compiler.compile(order.params.grammar)
        except FledgeError as error:
            return str(error)
        except BaseException as error:  # the library's own faults are no reason to leave
            _log.exception("a grammar could not be compiled")
            return f"the grammar cannot be used: {error!r}"
        return None


def refusal_of(order: Submit, message: str) -> Refusal:
    grammar = order.params.grammar
    return Refusal(order.number, message, True, grammar.source or None if grammar else None)
