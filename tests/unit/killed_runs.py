"""Runs of a stage in forks that are killed: for programs that the tests start.

Everything is imported once and each run is a fork, so that the moments lie in the work and not in
the imports.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fledge.contracts.progress import SilentProgress

Run = Callable[[Path], None]
"""Writes a directory, to its end."""


class NotedProgress(SilentProgress):
    """Leaves a mark where a run says that it goes on."""

    def __init__(self, mark: Path, words: str) -> None:
        self._mark, self._words = mark, words

    def note(self, text: str) -> None:
        if self._words in text:
            with self._mark.open("a") as file:
                file.write(".")


def count_marks(mark: Path) -> int:
    return len(mark.read_text()) if mark.exists() else 0


def fork(run: Run, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        run(out)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a run failed"
    return os.WIFSIGNALED(status)


def kill_at_random(
    run: Run,
    out: Path,
    *,
    unbroken: Path,
    count: int,
    rng: random.Random,
    within: tuple[float, float],
) -> int:
    """Kill `count` runs, each at some share of the time that an unbroken one takes."""
    started = time.monotonic()
    assert not was_killed(fork(run, unbroken))
    whole_s = time.monotonic() - started
    killed = 0
    while killed < count:
        child = fork(run, out)
        time.sleep(rng.uniform(*within) * whole_s)
        os.kill(child, signal.SIGKILL)
        killed += was_killed(child)
        if (out / "manifest.json").exists() and killed < count:
            shutil.rmtree(out)  # it came to its end: the kills that are left hit another run
    return killed
