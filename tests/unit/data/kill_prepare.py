"""Runs prepare in processes that are killed: started by the tests as a program of its own.

    python -m tests.unit.data.kill_prepare BASE OUT random SEED COUNT
    python -m tests.unit.data.kill_prepare BASE OUT flushes

`random` kills COUNT runs at random moments, `flushes` kills a run at its first flush of a file to
the disk, the next at its second, and so on until one comes to its end. Prints one JSON line:
how many runs were killed, and how many found work of an earlier one.
"""

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

from fledge.data.prepare import prepare
from fledge.store import cache_publish
from tests.unit.data.prepare_support import write_sources
from tests.unit.killed_runs import NotedProgress, count_marks, fork, kill_at_random, was_killed

ROWS_PER_SAVE = 40


def run(base: Path, out: Path, *, dies_at_flush: int | None = None) -> None:
    if dies_at_flush is not None:
        die_at_flush(dies_at_flush)
    prepare(
        write_sources(base),
        out,
        target="tiny",
        self_prompts=None,
        progress=NotedProgress(base / "mark", "going on"),
        base=base,
        rows_per_save=ROWS_PER_SAVE,
    )


def die_at_flush(number: int) -> None:
    flush, seen = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    cache_publish.os.fsync = fsync


def main() -> None:
    base, out, kind, *rest = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    write_sources(base)
    prepared = partial(run, base)
    killed = 0
    if kind == "random":
        killed = kill_at_random(
            prepared,
            out,
            unbroken=base / "unbroken",
            count=int(rest[1]),
            rng=random.Random(int(rest[0])),
            within=(0.05, 0.6),
        )
    else:
        while was_killed(fork(partial(run, base, dies_at_flush=killed + 1), out)):
            killed += 1
    assert not was_killed(fork(prepared, out))
    sys.stdout.write(json.dumps({"killed": killed, "resumed": count_marks(base / "mark")}))


if __name__ == "__main__":
    main()
