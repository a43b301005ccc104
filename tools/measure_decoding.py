"""Tokens per second of the engine by batch size, without a head and with one.

    python tools/measure_decoding.py --target T --out benchmarks/FILE.json
    python tools/measure_decoding.py --shape llama-8b --rate 0.777 --out benchmarks/FILE.json

Prompts are 128 random tokens, 256 tokens are generated greedily, end-of-text ignored: what the
script for other engines does too. Decode-only figures leave out a run of one token. A shape has
random weights and a random head; with `--rate` each draft is right by chance (`--sibling` for
those beside the first), so that engines can be compared at equal acceptance. One engine for each
way serves all batch sizes that there is memory for, and has captured its cycles before anything is
timed, as other engines do. Ways take turns, and one run of each goes before those that count;
`over_plain` has the 95% interval of resampled rounds. Printed and written after every batch size.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from capture_subjects import SHAPES
from measured_engines import (
    ADAPTIVE,
    PLAIN,
    chances,
    load_once,
    numbers,
    random_head,
    ratio_of,
    tree_of,
    wait,
)

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.contracts.errors import CapacityError
from fledge.engine.timing import measure_pass_times
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.ops.synthetic_walk import SyntheticWalk

PROMPT_LEN, ANSWER_LEN = 128, 256


class Bench:
    """One target with one head, and for every way an engine that serves all batch sizes."""

    def __init__(self, target: Target, head: Eagle3Head | None, options: argparse.Namespace):
        self.target, self.head, self.options = target, head, options
        self.engines: dict[str, Engine] = {}
        self.captured: dict[str, dict[str, float]] = {}
        for way in options.ways.split(","):
            engine = self.largest_engine(way)
            started = time.perf_counter()
            num_graphs = engine.capture_ahead(budget_s=options.capture_s)
            found = {"graphs": num_graphs, "seconds": time.perf_counter() - started}
            print(way, "captured ahead", json.dumps(found), flush=True)
            self.engines[way], self.captured[way] = engine, found

    def largest_engine(self, way: str) -> Engine:
        """For as many requests as are asked for and there is memory for."""
        most = self.options.largest.get(way, max(self.options.sizes))
        sizes = sorted(size for size in self.options.sizes if size <= most)
        while True:
            self.options.largest[way] = sizes[-1]
            try:
                return self.engine(way, sizes.pop())
            except CapacityError as error:
                print(way, self.options.largest[way], error, flush=True)
                if not sizes:
                    raise

    def engine(self, way: str, size: int) -> Engine:
        """`way` is plain, adaptive, or depth x width x budget of a fixed tree."""
        settings = EngineSettings(
            max_requests=size,
            max_pass_tokens=max(8192, size),
            cache_tokens=size * (PROMPT_LEN + self.options.answer_len + 64),
            share_prefixes=False,
            graphs=self.options.graphs,
            copies=self.options.rate is None,  # drafts that are right by chance are a head's
        )
        if way == PLAIN:
            return Engine(self.target, settings=settings)
        assert self.head is not None
        rate, sibling = self.options.rate, self.options.sibling
        rule = None if rate is None else SyntheticWalk(rate, sibling)
        if way == ADAPTIVE:
            settings = replace(settings, tree=tree_of(self.options.tree))
            name = self.options.target or self.options.shape
            times = measure_pass_times(self.target, self.head, settings, name=name)
            return Engine(self.target, self.head, settings, times=times, measured_with=rule)
        settings = replace(settings, tree=tree_of(way), controller="fixed")
        return Engine(self.target, self.head, settings, measured_with=rule)

    def used_gib(self) -> float:
        """Memory of the device that is taken."""
        if self.target.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info(self.target.device)
        return (total - free) / 2**30

    def cells(self, size: int) -> dict[str, dict[str, Any]]:
        """One batch size in every way, which take turns."""
        chance = random.Random(size)
        top = min(40000, self.target.vocab_size - 1)
        prompts = [[chance.randrange(100, top) for _ in range(PROMPT_LEN)] for _ in range(size)]
        most = self.options.largest
        runs = {
            way: Timed(engine, prompts, self.options.answer_len)
            for way, engine in self.engines.items()
            if size <= most[way]
        }
        for run in runs.values():
            run.warm_up(self.options.warm_len)
        for turn in range(self.options.rounds):
            for run in list(runs.values())[:: 1 if turn % 2 else -1]:
                run.round()
        found = {way: run.found() for way, run in runs.items()}
        for way, cell in found.items():
            cell["memory_gib"] = self.used_gib()
            if way != PLAIN and PLAIN in found:
                cell["over_plain"] = ratio_of(found[PLAIN]["seconds"], cell["seconds"])
        return found


class Timed:
    """Requests that arrive together in an engine, again and again."""

    def __init__(self, engine: Engine, prompts: list[list[int]], answer_len: int) -> None:
        self.engine, self.prompts, self.answer_len = engine, prompts, answer_len
        self.seconds: list[float] = []
        self.firsts: list[float] = []
        self.accept_length = 0.0

    def warm_up(self, num_tokens: int) -> None:
        self._run(num_tokens)
        self.before, self.counted = self.engine.stats, self._count()

    def _count(self) -> dict[str, int]:
        """What was awaited, and tokens that the head was told of and that were kept from it."""
        ahead = self.engine._cycle.ahead
        bare = ahead.steady.bare
        return {"drains": ahead.num_drains, "told": bare.num_told, "untold": bare.num_bare}

    def round(self) -> None:
        self.seconds.append(self._run(self.answer_len))
        self.after = self.engine.stats
        self.firsts.append(self._run(1))

    def _run(self, num_tokens: int) -> float:
        # Greedy texts do not depend on seeds, but the coins of synthetic drafts do.
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
            for seed in range(len(self.prompts))
        ]
        wait(self.engine.target.device)
        started = time.perf_counter()
        answers = self.engine.generate(self.prompts, params)
        seconds = time.perf_counter() - started
        if num_tokens == self.answer_len:
            self.accept_length = sum(a.stats.accept_length for a in answers) / len(answers)
        return seconds

    def found(self) -> dict[str, Any]:
        size, before, after = len(self.prompts), self.before, self.after
        best, first_s, num_tokens = min(self.seconds), min(self.firsts), size * self.answer_len
        return {
            "tokens_per_s": num_tokens / best,
            "tokens_per_s_low": num_tokens / max(self.seconds),
            "decode_tokens_per_s": (num_tokens - size) / (best - first_s),
            "seconds": self.seconds,
            "first_token_s": first_s,
            "accept_length": self.accept_length,
            "cycles": after.num_passes - before.num_passes,
            "target_s": after.target_s - before.target_s,
            "draft_s": after.draft_s - before.draft_s,
            "other_s": after.other_s - before.other_s,
            "budgets": {
                size: count - before.budgets.get(size, 0) for size, count in after.budgets.items()
            },
            "timed_replayed": after.num_replayed - before.num_replayed,
            "timed_launched": after.num_launched - before.num_launched,
            "timed_captured": after.num_captured - before.num_captured,
            **{name: count - self.counted[name] for name, count in self._count().items()},
            "plans": [plan.shown() for plan in self.engine._controller.plans(size)],
            "controller": after.controller,
        }


def largest_sizes(words: str) -> dict[str, int]:
    """Of WAY=SIZE,..."""
    pairs = (word.split("=") for word in words.split(",") if word)
    return {way: int(size) for way, size in pairs}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--head", type=Path, help="a head's directory; shapes have a random one")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--rate", type=chances, help="of a draft, or one a depth: 0.8,0.7,...")
    parser.add_argument("--sibling", type=float, default=0.0)
    parser.add_argument("--ways", default=PLAIN, help="plain,adaptive,5x1x5,...")
    parser.add_argument("--tree", default="6x8x40", help="the largest of adaptive")
    parser.add_argument("--sizes", type=numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--largest", type=largest_sizes, default={}, help="WAY=SIZE,...")
    parser.add_argument("--answer-len", type=int, default=ANSWER_LEN)
    parser.add_argument("--warm-len", type=int, default=ANSWER_LEN, help="answers before timing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=600.0, help="no new size after it")
    parser.add_argument("--capture-s", type=float, default=45.0, help="for cycles captured ahead")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    ends = time.perf_counter() + options.budget_s
    target = load_once(options.target, options.shape, options.device, options.dtype)
    head = None
    if options.ways != PLAIN:
        head = load_head(options.head) if options.head else random_head(target, options.draft_vocab)
    bench = Bench(target, head, options)
    is_cuda = target.device.type == "cuda"
    document: dict[str, Any] = {
        "what": "tokens per second by batch size",
        "target": Path(options.target).name if options.target else f"{options.shape}, random",
        "options": {name: str(one) for name, one in vars(options).items() if name != "out"},
        "captured_ahead": bench.captured,
        "cells": {},
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
        ),
    }
    for size in options.sizes:
        if time.perf_counter() > ends:
            print(f"no time for {size}", flush=True)
            document.setdefault("left_out", []).append(size)
            continue
        document["cells"][str(size)] = found = bench.cells(size)
        for way, cell in found.items():
            shown = {k: round(v, 3) for k, v in cell.items() if isinstance(v, int | float)}
            print(size, way, json.dumps(shown | cell.get("over_plain", {})), flush=True)
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
