"""Starts programs by way of tests/warm_start.py, for tests that would start a Python process."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).parents[1]
_STREAMS = {"stdin": ("rb", "wb"), "stdout": ("wb", "rb"), "stderr": ("wb", "rb")}
"""How the program opens a pipe, and how we do."""


class WarmPrograms:
    """What a test run needs to start programs; its processes share one that all are forks of."""

    def __init__(self, shared: Path, keeper: int) -> None:
        self._address = shared / "warm-start"
        with (shared / "warm-start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._address.exists():
                self._begin(keeper)

    def _begin(self, keeper: int) -> None:
        subprocess.run(
            [sys.executable, "-m", "tests.warm_start", str(self._address), str(keeper)],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def start(
        self,
        command: Sequence[object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
    ) -> "WarmProgram":
        """As subprocess.Popen does it; the command is Python's, with -m or -c."""
        assert start_new_session
        words = [str(word) for word in command if word not in (sys.executable, "-P")]
        order = {
            "command": words,
            "directory": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
            "numbers": [0, 1, 2, *pass_fds],
        }
        program = WarmProgram()
        given = dict(zip(_STREAMS, (stdin, stdout, stderr), strict=True))
        with _Files(program, given, text) as files:
            program.begin(self._address, order, [*files.numbers, *pass_fds])
        return program

    def run(
        self, command: Sequence[object], *, timeout: float | None = None, **options: Any
    ) -> "subprocess.CompletedProcess[Any]":
        """As subprocess.run does it, with what the program says."""
        program = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        stdout, stderr = program.communicate(timeout=timeout)
        assert program.returncode is not None
        return subprocess.CompletedProcess(list(command), program.returncode, stdout, stderr)


class _Files:
    """The files that become a program's streams, open until the program has them."""

    def __init__(self, program: "WarmProgram", given: dict[str, Any], text: bool) -> None:
        self.numbers: list[int] = []
        self._ours: list[int] = []
        for number, (name, wanted) in enumerate(given.items()):
            theirs: int
            if wanted == subprocess.PIPE:
                ends = os.pipe()
                theirs, ours = ends if name == "stdin" else ends[::-1]
                mode = _STREAMS[name][1]
                setattr(program, name, os.fdopen(ours, mode.rstrip("b") if text else mode))
                self._ours.append(theirs)
            elif wanted == subprocess.DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
                self._ours.append(theirs)
            elif wanted is None:
                theirs = number
            else:
                theirs = wanted if isinstance(wanted, int) else wanted.fileno()
            self.numbers.append(theirs)

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._ours:
            os.close(file)


class WarmProgram:
    """A program that runs, with the manners of subprocess.Popen."""

    def __init__(self) -> None:
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self.returncode: int | None = None
        self.pid = 0
        self._told = b""

    def begin(self, address: Path, order: dict[str, Any], files: list[int]) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(str(address))
        socket.send_fds(self._link, [json.dumps(order).encode()], files)
        self.pid = self._read_number()

    def _read_number(self) -> int:
        while b"\n" not in self._told:
            news = self._link.recv(64)
            assert news, "nobody watches the program"
            self._told += news
        number, _, self._told = self._told.partition(b"\n")
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                self.returncode = self._read_number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            # Whoever looks for the process from now on must not find it.
            self._link.settimeout(None)
            self._link.sendall(b".")
            self._link.recv(1)
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """All that it says, once it has ended."""
        if self.stdin is not None:
            if given is not None:
                self.stdin.write(given)
            self.stdin.close()
        with ThreadPoolExecutor(2) as readers:
            streams = (self.stdout, self.stderr)
            said = [readers.submit(one.read) if one else None for one in streams]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            texts = tuple(one.result() if one else None for one in said)
        for stream in streams:
            if stream is not None:
                stream.close()
        return texts[0], texts[1]
