"""Runs captures in processes that are killed: started by the tests as a program of its own.

    python -m tests.unit.features.kill_capture BASE SEED COUNT

A run in BASE/unbroken is left alone; those in BASE/out are killed at COUNT random moments, and the
last comes to its end. Prints one JSON line: how many runs were killed, and how many found shards
of an earlier one.
"""

import json
import random
import sys
from pathlib import Path

import torch

from fledge.testing import save_tiny_target
from tests.unit.features.capture_support import random_samples, run_capture, save_corpus
from tests.unit.killed_runs import NotedProgress, count_marks, fork, kill_at_random, was_killed

NUM_SAMPLES = 60


def main() -> None:
    base, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng, out, mark = random.Random(seed), base / "out", base / "mark"
    save_tiny_target(base / "target")
    lengths = [rng.randrange(3, 120) for _ in range(NUM_SAMPLES)]
    save_corpus(base / "corpus", base / "target", random_samples(lengths))

    def run(place: Path) -> None:
        progress = NotedProgress(mark, "were made before.")
        run_capture(base / "corpus", base / "target", place, progress=progress)

    killed = kill_at_random(
        run, out, unbroken=base / "unbroken", count=count, rng=rng, within=(0.1, 0.7)
    )
    assert not was_killed(fork(run, out))
    sys.stdout.write(json.dumps({"killed": killed, "resumed": count_marks(mark)}))


if __name__ == "__main__":
    main()
