"""What it is worth that cycles run ahead of the host, and that they are captured.

    python tools/measure_overlap.py --target smollm2-135m-instruct --out benchmarks/FILE.json
    python tools/measure_overlap.py --shape llama-8b --out benchmarks/FILE.json

Three engines serve the same requests by turns:

    ahead       captured cycles; the next one is started before the last one is read
    waiting     captured cycles; the host reads each one, plans, and starts the next
    piece by piece    nothing is captured, and every cycle is planned and launched by the host

Requests only decode while they are timed. The fastest of the rounds counts.
"""

import itertools
import time
from collections.abc import Iterable
from typing import Any

from measured_engines import (
    PLAIN,
    Decoding,
    Results,
    Subject,
    numbers,
    option_parser,
    tree_of,
)

AHEAD, WAITING, PIECES = "ahead", "waiting", "piece by piece"


def cell(subject: Subject, way: str, size: int) -> dict[str, Any]:
    options = subject.options
    levels = 1 if way == PLAIN else tree_of(way).depth + 1
    room = ((options.rounds + 1) * options.cycles + 20) * levels
    captured = "auto" if subject.target.device.type == "cuda" else "on"
    prompts = subject.prompts(size, options.prompt_len)
    ways: dict[str, dict[str, Any]] = {
        AHEAD: {"graphs": captured},
        WAITING: {"graphs": captured, "waits_for_cycles": True},
        PIECES: {"graphs": "off"},
    }
    running = {
        name: Decoding(
            subject.engine(way, size, options.prompt_len + room, **settings), prompts, room
        )
        for name, settings in ways.items()
    }
    for decoding in running.values():
        decoding.settle()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, decoding in running.items():
            # Another engine's work must not be awaited inside this one's time.
            decoding.run(2)
            rounds[name].append(decoding.timed(options.cycles))
    for decoding in running.values():
        decoding.close()
    best = {name: min(found, key=lambda one: one["cycle_s"]) for name, found in rounds.items()}
    return {
        **{f"{name} cycle_s": one["cycle_s"] for name, one in best.items()},
        **{f"{name} tokens_per_s": one["tokens_per_s"] for name, one in best.items()},
        "gain of running ahead": best[WAITING]["cycle_s"] / best[AHEAD]["cycle_s"] - 1,
        "gain of both": best[PIECES]["cycle_s"] / best[AHEAD]["cycle_s"] - 1,
        "rounds": rounds,
    }


def main(words: Iterable[str] | None = None) -> None:
    parser = option_parser(__doc__, budget_s=120.0)
    parser.add_argument("--ways", default="5x1x5,6x4x24")
    parser.add_argument("--sizes", default="1,8,32,64")
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=128)
    options = parser.parse_args(None if words is None else list(words))
    ways = options.ways.split(",")
    subject = Subject.load(options, has_head=ways != [PLAIN])
    results = Results("decoding with and without running ahead of the host", subject)
    for size, way in results.left(list(itertools.product(numbers(options.sizes), ways))):
        started = time.perf_counter()
        found = cell(subject, way, size)
        results.add((size, way), {**found, "took_s": time.perf_counter() - started})


if __name__ == "__main__":
    main()
