"""Programs that start at once: forks of a process that has imported everything heavy already.

    python -m tests.warm_start SOCKET KEEPER

Importing torch and transformers takes seconds, and many tests start a program. This one imports
them once for all processes of a test run, leaves a process behind that listens at SOCKET, and ends.
A client sends what to run and the files that are to be its stdin, stdout, stderr, and maybe more;
it is told the program's process id, and how it ended. A program is a process of its own with its
own arguments, environment and directory; it handles signals and ends as Python does. What it
cannot show is how Python and its imports start: tests about that start a real one.

The process leaves when the process KEEPER is no more.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import termios
from importlib import import_module
from typing import Any, NamedTuple

_PRELOADED = (
    "fledge.testing",
    "fledge.cli.main",
    "fledge.cli.generate",
    "fledge.pipeline",
    "fledge.server.engine_process",
    "fledge.server.serving",
    "fledge.training.stage",
    "fledge.training.train_input",
    "transformers.models.llama.modeling_llama",
    "tests.unit.tiny_gguf",
    "tests.unit.data.regenerate_support",
    "tests.unit.features.capture_support",
    "typer.rich_utils",
)
_MAX_ORDER_BYTES = 1 << 20
_MAX_FILES = 8
_LOOK_AFTER_KEEPER_S = 1.0


class Job(NamedTuple):
    """What a client wants, in a process of its own."""

    order: dict[str, Any]
    files: list[int]


def main(place: str, keeper: int) -> Job | None:
    """Serve until the keeper is gone; in a fork that is to become a program, what it is to do."""
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()  # or the first collection of every fork would copy all that is shared
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(_LOOK_AFTER_KEEPER_S)
    while _is_alive(keeper):
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        with client:
            if os.fork() == 0:
                listener.close()
                return _watch(client)
    return None


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def _watch(client: socket.socket) -> Job | None:
    """Start the program and tell the client how it ends; returns in the program itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.settimeout(None)
    text, files, _, _ = socket.recv_fds(client, _MAX_ORDER_BYTES, _MAX_FILES)
    if not text:
        os._exit(0)
    job = Job(json.loads(text), files)
    program = os.fork()
    if program == 0:
        client.close()
        return job
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # a client that has left wants to know nothing
        client.sendall(f"{program}\n".encode())
        # Its number stays its own until the client, which may send it signals, knows of its end.
        ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        client.sendall(f"{code}\n".encode())
        client.recv(1)
        os.waitpid(program, 0)
    os._exit(0)


def become(job: Job) -> None:
    """Run the program of a job, to the end of this process."""
    order = job.order
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _place_files(job.files, order["numbers"])
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    atexit.register(gc.unfreeze)  # the end of Python clears up what it made
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    kind, what, *words = order["command"]
    sys.argv = [kind if kind == "-c" else what, *words]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _place_files(files: list[int], numbers: list[int]) -> None:
    """The files under these numbers and no others."""
    for file in list(files):
        # Out of the way of all numbers, before the first of them is taken.
        files.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1))
        os.close(files.pop(0))
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    job = main(sys.argv[1], int(sys.argv[2]))
    if job is not None:
        become(job)
