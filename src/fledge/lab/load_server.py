"""Our own server, started for a measurement as anybody would start it, and ended after it."""

import collections
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from fledge.contracts.errors import FledgeError
from fledge.contracts.progress import Progress
from fledge.lab.load_driver import BenchError

_LISTENING = re.compile(r"is served at (http://\S+/v1)")
_POLL_S = 0.1
_END_S = 30.0


class ServerStartError(FledgeError):
    """The server ended before it could be asked; it has said why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def own_server(options: Sequence[str], *, name: str, progress: Progress) -> Iterator[str]:
    """The address of a `fledge serve` that is ready to answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fledge", "serve", "--port", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "FLEDGE_API_KEYS"},
        start_new_session=True,
    )
    log = _Log(process)
    try:
        with progress.task(f"starting the server ({name})", unit=""):
            url = log.wait_for_address()
            _wait_until_ready(url, log)
        yield url
    finally:
        _end(process)
        log.join()


class _Log:
    """Reads what the server says, so that it never waits for us, and keeps the last of it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: collections.deque[str] = collections.deque(maxlen=50)
        self._url: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._lines.append(line.rstrip())
                match = _LISTENING.search(line)
                if match is not None:
                    self._url = match[1]

    def wait_for_address(self) -> str:
        while self._url is None:
            self.require_running()
            time.sleep(_POLL_S)
        return self._url

    def require_running(self) -> None:
        exit_code = self._process.poll()
        if exit_code is None:
            return
        self.join()
        said = [line for line in self._lines if line.startswith("error: ")]
        last = self._lines[-1] if self._lines else "nothing"
        reason = said[-1].removeprefix("error: ") if said else last
        raise ServerStartError(f"the server did not start: {reason}", max(1, exit_code))

    def join(self) -> None:
        self._thread.join(_END_S)


def _wait_until_ready(url: str, log: _Log) -> None:
    with httpx.Client(base_url=url.removesuffix("/v1"), trust_env=False, timeout=10.0) as client:
        while True:
            log.require_running()
            try:
                if client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it is about to end, or too busy to answer in time
            time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[str]") -> None:
    """Ask it to leave, with its engine; insist when it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise BenchError(f"the server did not leave within {_END_S:g} s and was killed.") from error
