"""Runs selections in processes that are killed: started by the tests as a program of its own.

    python -m tests.unit.lab.kill_select BASE SEED COUNT

A run in BASE/unbroken is left alone; those in BASE/out are killed at COUNT random moments, and the
last comes to its end. Prints one JSON line: how many runs were killed, and how many found visits
of an earlier one.
"""

import json
import random
import sys
from pathlib import Path

import torch

from fledge.contracts.progress import SilentProgress
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import TreeSettings
from fledge.engine.engine import Engine
from fledge.lab.select_job import prepare_job
from fledge.lab.select_stage import select
from fledge.models.head_files import save_head
from fledge.models.target import Target
from fledge.testing import save_tiny_target, tiny_head
from tests.unit.killed_runs import NotedProgress, count_marks, fork, kill_at_random, was_killed

NUM_HEADS = 3


def count_passes(engine: Engine) -> float:
    return 50 * engine.stats.num_passes + engine.stats.num_drafts


def main() -> None:
    base, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng, mark = random.Random(seed), base / "mark"
    save_tiny_target(base / "target", max_position_embeddings=2048)
    target = Target.load(base / "target", dtype=torch.float32, device=torch.device("cpu"))
    heads = [base / f"head-{i}" for i in range(NUM_HEADS)]
    for i, head in enumerate(heads):
        save_head(tiny_head(target, seed=i), head)
    settings = SelectSettings(
        suites=("builtin/chat,qa",),
        prompts=3,
        max_tokens=4,
        warm_up=1,
        tree=TreeSettings(depth=2, width=1, budget=2),
        controller="fixed",
    )

    def run(place: Path) -> None:
        progress = NotedProgress(mark, "were made before.")
        job = prepare_job(
            heads, str(base / "target"), settings, device="cpu", progress=SilentProgress()
        )
        select(job, settings, place, progress=progress, clock=count_passes)

    killed = kill_at_random(
        run, base / "out", unbroken=base / "unbroken", count=count, rng=rng, within=(0.1, 0.7)
    )
    assert not was_killed(fork(run, base / "out"))
    sys.stdout.write(json.dumps({"killed": killed, "resumed": count_marks(mark)}))


if __name__ == "__main__":
    main()
