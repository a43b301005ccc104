"""How much of a cycle is spent outside target and head passes, at batch 1, 32 and 256.

    python tools/measure_scheduler.py --out benchmarks/FILE.json

Passes are timed at the networks' own calls: everything else counts as outside, from the queue to
block tables, building the tensors of a pass, choosing children, walking the trees, moving entries
and handing out tokens.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.engine.head_drafter import HeadDrafter
from fledge.testing import target_of, tiny_head, tiny_model


class Stopwatch:
    """Seconds spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def measure(*, has_head: bool, num_requests: int, cycles: int) -> dict[str, float]:
    target = target_of(tiny_model())
    head = tiny_head(target) if has_head else None
    settings = EngineSettings(
        max_requests=num_requests,
        max_pass_tokens=max(2048, 16 * num_requests),
        tree=TreeSettings(depth=3, width=2, budget=4),
        controller="fixed",
    )
    engine = Engine(target, head, settings)
    in_target, in_head = Stopwatch(), Stopwatch()
    target.forward = in_target.around(target.forward)
    if isinstance(engine._drafter, HeadDrafter):
        network = engine._drafter.head
        network.forward = in_head.around(network.forward)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=4 * cycles + 16, ignore_eos=True)
    for _ in range(num_requests):
        prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(8, 64))]
        engine.add(engine.make_request(prompt, params))
    while engine.stats.num_emitted < 2 * num_requests:
        engine.step()
    samples = []
    for _ in range(cycles):
        in_target.seconds = in_head.seconds = 0.0
        started = time.perf_counter()
        engine.step()
        wall_s = time.perf_counter() - started
        outside_s = wall_s - in_target.seconds - in_head.seconds
        samples.append((in_target.seconds, in_head.seconds, outside_s))
    target_s, head_s, outside_s = (
        statistics.median(column) for column in zip(*samples, strict=True)
    )
    return {
        "requests": num_requests,
        "target_ms": round(1e3 * target_s, 3),
        "head_ms": round(1e3 * head_s, 3),
        "outside_ms": round(1e3 * outside_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        {"drafts": "head" if has_head else "none", **row}
        for has_head in (False, True)
        for num_requests in (1, 32, 256)
        for row in [measure(has_head=has_head, num_requests=num_requests, cycles=options.cycles)]
    ]
    document = {
        "provenance": provenance.collect(device="cpu"),
        "target": "tiny llama of fledge.testing: 4 layers, width 32; median over cycles",
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
