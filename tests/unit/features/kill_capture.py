"""Runs captures in processes that are killed: started by the tests as a program of its own.

    python -m tests.unit.features.kill_capture BASE SEED COUNT

A run in BASE/unbroken is left alone; those in BASE/out are killed at COUNT random moments, and the
last comes to its end. Everything is imported once and each run is a fork, so that the moments lie
in the work. Prints one JSON line: how many runs were killed, and how many found shards of an
earlier one.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from fledge.contracts.progress import SilentProgress
from fledge.testing import save_tiny_target
from tests.unit.features.capture_support import random_samples, run_capture, save_corpus

NUM_SAMPLES = 60


class NotedProgress(SilentProgress):
    """Leaves a mark where a run goes on."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def note(self, text: str) -> None:
        if text.endswith("were made before."):
            with self._mark.open("a") as file:
                file.write(".")


def fork(base: Path, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        progress = NotedProgress(base / "mark")
        run_capture(base / "corpus", base / "target", out, progress=progress)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a run failed"
    return os.WIFSIGNALED(status)


def main() -> None:
    base, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng, out = random.Random(seed), base / "out"
    save_tiny_target(base / "target")
    lengths = [rng.randrange(3, 120) for _ in range(NUM_SAMPLES)]
    save_corpus(base / "corpus", base / "target", random_samples(lengths))
    started = time.monotonic()
    assert not was_killed(fork(base, base / "unbroken"))
    whole_s = time.monotonic() - started
    killed = 0
    while killed < count:
        child = fork(base, out)
        time.sleep(rng.uniform(0.1, 0.7) * whole_s)
        os.kill(child, signal.SIGKILL)
        killed += was_killed(child)
        if (out / "manifest.json").exists() and killed < count:
            shutil.rmtree(out)  # it came to its end: the kills that are left hit another run
    assert not was_killed(fork(base, out))
    mark = base / "mark"
    resumed = len(mark.read_text()) if mark.exists() else 0
    sys.stdout.write(json.dumps({"killed": killed, "resumed": resumed}))


if __name__ == "__main__":
    main()
