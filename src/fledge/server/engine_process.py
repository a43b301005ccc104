"""The engine process: loads what it is told to, then serves until the server has gone.

It is started as `python -m fledge.server.engine_process FD`, where FD is its end of a socket pair.
A fault of the device can only be healed by a new process, and no pass delays a stream's bytes.
"""

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from fledge.contracts.errors import FledgeError
from fledge.contracts.progress import SilentProgress, Task
from fledge.contracts.tuned_settings import obey
from fledge.engine.engine import Engine
from fledge.models.placement import pick_device
from fledge.server.engine_loop import EngineBrokenError, EngineLoop
from fledge.server.grammar_lane import prepare_grammars
from fledge.server.wire import (
    EngineChoice,
    EngineFacts,
    LoadFailure,
    News,
    Note,
    Order,
    Ready,
    messages,
    pack,
)

BROKEN = 70
"""Exit code of an engine that cannot go on."""


class Sender:
    """Sends whole messages, whichever thread they come from."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: News) -> None:
        frame = pack(message)
        with self._lock:
            self._connection.sendall(frame)


class WireLogHandler(logging.Handler):
    """Log lines go to the server, which writes one log."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.send(Note(record.levelno, self.format(record)))


class WireProgress(SilentProgress):
    """What loading says; a log has no use for bars, only for what begins."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        self.note(label)
        with super().task(label, total, unit) as task:
            yield task

    def note(self, text: str) -> None:
        self._sender.send(Note(logging.INFO, text))


def main(arguments: list[str]) -> int:
    """The process from its first message to its exit code."""
    # The server decides when to leave: a terminal or a service manager signals both at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    connection = socket.socket(fileno=int(arguments[0]))
    sender = Sender(connection)
    logging.getLogger("fledge").addHandler(WireLogHandler(sender))
    incoming = messages(connection)
    choice: EngineChoice = next(incoming)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(incoming, orders), daemon=True).start()
    try:
        engine = _load(choice, sender)
        prepare_grammars(engine)
    except FledgeError as error:
        sender.send(LoadFailure(str(error), error.exit_code))
        return error.exit_code
    sender.send(Ready(_facts(engine)))
    try:
        EngineLoop(engine, orders, sender.send).run()
    except EngineBrokenError as error:
        sender.send(Note(logging.ERROR, f"the engine is broken: {error}"))
        return BROKEN


def _read(incoming: Iterator[Order], orders: "queue.SimpleQueue[Order]") -> None:
    try:
        for order in incoming:
            orders.put(order)
    except OSError:
        pass
    # The server has gone: there is nobody to answer, whatever the engine is doing.
    os._exit(0)


def _load(choice: EngineChoice, sender: Sender) -> Engine:
    tuned = choice.tuned.get(pick_device(choice.device).type)
    progress = WireProgress(sender)
    engine = Engine.load(
        choice.target,
        choice.head,
        obey(tuned, choice.settings),
        device=choice.device,
        dtype=choice.dtype,
        progress=progress,
    )
    engine.capture_ahead(progress)
    return engine


def _facts(engine: Engine) -> EngineFacts:
    target = engine.target
    assert target.directory is not None, "a loaded target has a directory"
    return EngineFacts(
        process_id=os.getpid(),
        target_dir=target.directory,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        context_len=target.context_len,
        max_tokens=engine.max_tokens,
        max_requests=engine.settings.max_requests,
        settings=engine.settings,
    )


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # Threads of libraries may wait for each other at a regular exit.
    os._exit(exit_code)
