"""One JSON object a line, on stderr, written by a thread: a slow reader of the log stops nobody."""

import json
import logging
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any

_MAX_LINES = 10_000
_LOGGERS = ("fledge", "uvicorn.error")

request_log = logging.getLogger("fledge.server.request")


class JsonFormatter(logging.Formatter):
    """A log record as JSON; `extra={"fields": {...}}` puts fields beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class _BoundedQueueHandler(QueueHandler):
    """Lines that nobody takes are dropped in the end, rather than filling the memory."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


@contextmanager
def json_logs() -> Iterator[None]:
    """While entered, what fledge and its web server log is written as JSON lines."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_LINES)
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(JsonFormatter())
    listener = QueueListener(lines, writer)
    handler = _BoundedQueueHandler(lines)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(one, one.handlers, one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.handlers, one.propagate = [handler], False
        one.setLevel(logging.INFO if one.name == "fledge" else logging.WARNING)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        for one, handlers, level, propagate in before:
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)
