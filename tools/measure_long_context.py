"""Decoding behind long contexts: does time grow by more than reading the cache costs?

    python tools/measure_long_context.py --shape llama-8b-long --out benchmarks/FILE.json

One engine per batch size and way serves all contexts, from short to long, so that a captured cycle
is the same for all of them. Prompts are not read but filled in: cache memory holds noise, every
request has blocks of its own, and all but the last block of a prompt counts as read. Decoding costs
the same, and a prompt of 16 x 32k tokens costs nothing.

    growth        seconds of a cycle behind this context less those behind the shortest
    reading       bytes of cache that the cycle reads more than that one, over measured bandwidth
    over_reading  growth over reading: 1.0 where nothing grows but what has to be read
"""

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from measured_engines import PLAIN, Decoding, Results, Subject, numbers, option_parser, tree_of
from rooflines import FORMULA, Limits, floor

from fledge import Engine
from fledge.engine.sequence import Sequence


def fill_in_prompts(engine: Engine) -> None:
    """Have prompts count as read, but for what follows their last whole block but one."""
    cache, start = engine._cache, engine._cache.start
    for pool in [*cache.target_memory.pools.values(), cache.head_memory]:
        for layer in pool.layer_ids:
            for rows in pool.layer(layer):
                rows.normal_()

    def start_filled(seq: Sequence) -> None:
        start(seq)
        num_filled = max(0, seq.len // cache.block_size - 1) * cache.block_size
        if cache.reserve(seq, num_filled):
            seq.kv_len, seq.head_len = num_filled, max(1, num_filled)

    cache.start = start_filled  # type: ignore[method-assign]


class Bench:
    """One batch size in one way."""

    def __init__(self, subject: Subject, way: str, size: int, limits: Limits) -> None:
        self.subject, self.way, self.size, self.limits = subject, way, size, limits
        options = subject.options
        levels = 1 if way == PLAIN else tree_of(way).depth + 1
        self.room = ((options.rounds) * options.cycles + 20) * levels
        longest = max(numbers(options.contexts))
        graphs = "auto" if subject.target.device.type == "cuda" else "on"
        self.engine = subject.engine(way, size, longest + self.room, graphs=graphs)
        # Memory is there once something was written to it.
        warm = Decoding(self.engine, subject.prompts(size, 32), self.room)
        warm.settle()
        warm.close()
        fill_in_prompts(self.engine)
        self.shortest: dict[str, Any] | None = None

    def cell(self, context: int) -> dict[str, Any]:
        options = self.subject.options
        prompts = self.subject.prompts(self.size, context)
        decoding = Decoding(self.engine, prompts, self.room)
        decoding.settle(6)
        rounds = [decoding.timed(options.cycles) for _ in range(options.rounds)]
        length = sum(seq.kv_len for seq in decoding.sequences) // self.size
        decoding.close()
        best = min(rounds, key=lambda one: one["cycle_s"])
        least = floor(self.subject, self.way, self.size, length, self.limits)
        found = {
            **best,
            "token_s": 1.0 / best["tokens_per_s"],
            "tokens_behind": length,
            **least,
            "times_floor": best["cycle_s"] / least["floor_s"],
            "rounds_cycle_s": [one["cycle_s"] for one in rounds],
        }
        if self.shortest is None:
            self.shortest = found
        else:
            growth = found["cycle_s"] - self.shortest["cycle_s"]
            reading = (found["bytes"] - self.shortest["bytes"]) / self.limits.bytes_per_s
            found |= {"growth_s": growth, "reading_s": reading, "over_reading": growth / reading}
        return found


def main(words: Iterable[str] | None = None) -> None:
    parser = option_parser(__doc__, budget_s=100.0)
    parser.add_argument("--ways", default="plain,5x1x5")
    parser.add_argument("--sizes", default="1,16")
    parser.add_argument("--contexts", default="1024,8192,32768", help="from short to long")
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(None if words is None else list(words))
    ways = options.ways.split(",")
    subject = Subject.load(options, has_head=ways != [PLAIN])
    limits = Limits(subject.target.device, subject.target.dtype)
    results = Results(
        "decoding behind long contexts", subject, floor=FORMULA, limits=limits.as_json()
    )
    cells = list(itertools.product(numbers(options.sizes), ways, numbers(options.contexts)))
    bench: Bench | None = None
    for size, way, context in results.left(cells):
        if bench is None or (bench.size, bench.way) != (size, way):
            bench = None  # its memory is needed for the next one
            gc.collect()
            if subject.target.device.type == "cuda":
                torch.cuda.empty_cache()
            bench = Bench(subject, way, size, limits)
        results.add((size, way, context), bench.cell(context))


if __name__ == "__main__":
    main()
