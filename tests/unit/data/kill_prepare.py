"""Runs prepare in processes that are killed: started by the tests as a program of its own.

    python -m tests.unit.data.kill_prepare BASE OUT random SEED COUNT
    python -m tests.unit.data.kill_prepare BASE OUT flushes

`random` kills COUNT runs at random moments, `flushes` kills a run at its first flush of a file to
the disk, the next at its second, and so on until one comes to its end. Everything is imported once
and each run is a fork, so that the moments lie in the work and not in the imports. Prints one JSON
line: how many runs were killed, and how many found work of an earlier one.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from fledge.contracts.progress import SilentProgress
from fledge.data.prepare import prepare
from fledge.store import cache_publish
from tests.unit.data.prepare_support import write_sources

ROWS_PER_SAVE = 40


class NotedProgress(SilentProgress):
    """Leaves a mark where a run goes on."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def note(self, text: str) -> None:
        if text.startswith("going on"):
            with self._mark.open("a") as file:
                file.write(".")


def run(base: Path, out: Path) -> None:
    settings = write_sources(base)
    prepare(
        settings,
        out,
        target="tiny",
        self_prompts=None,
        progress=NotedProgress(base / "mark"),
        base=base,
        rows_per_save=ROWS_PER_SAVE,
    )


def fork(base: Path, out: Path, *, dies_at_flush: int | None = None) -> int:
    child = os.fork()
    if child:
        return child
    if dies_at_flush is not None:
        die_at_flush(dies_at_flush)
    try:
        run(base, out)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def die_at_flush(number: int) -> None:
    flush, seen = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    cache_publish.os.fsync = fsync


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a run failed"
    return os.WIFSIGNALED(status)


def main() -> None:
    base, out, kind, *rest = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    write_sources(base)
    killed = 0
    if kind == "random":
        rng, count = random.Random(int(rest[0])), int(rest[1])
        started = time.monotonic()
        assert not was_killed(fork(base, base / "unbroken"))
        whole_s = time.monotonic() - started
        while killed < count:
            child = fork(base, out)
            time.sleep(rng.uniform(0.05, 0.6) * whole_s)
            os.kill(child, signal.SIGKILL)
            killed += was_killed(child)
            if (out / "manifest.json").exists() and killed < count:
                shutil.rmtree(out)  # it came to its end: the kills that are left hit another run
    else:
        while was_killed(fork(base, out, dies_at_flush=killed + 1)):
            killed += 1
    assert not was_killed(fork(base, out))
    mark = base / "mark"
    resumed = len(mark.read_text()) if mark.exists() else 0
    sys.stdout.write(json.dumps({"killed": killed, "resumed": resumed}))


if __name__ == "__main__":
    main()
