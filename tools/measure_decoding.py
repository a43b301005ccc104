"""Tokens per second of the engine by batch size, without a head and with one.

    python tools/measure_decoding.py --target T --out benchmarks/FILE.json
    python tools/measure_decoding.py --shape llama-8b --rate 0.777 --out benchmarks/FILE.json

Prompts are 128 random tokens, 256 tokens are generated greedily, end-of-text ignored: what the
script for other engines does too. Decode-only figures leave out a run of one token. A shape has
random weights and a random head; with `--rate` each draft is right by chance (`--sibling` for
those beside the first), so that engines can be compared at equal acceptance. Cycles are captured
before anything is timed, as other engines do, and one run goes before those that count. Printed as
it goes, written after every cell.
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
from measured_engines import load_once, random_head, wait

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.engine.timing import measure_pass_times
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.ops.synthetic_walk import SyntheticWalk

PROMPT_LEN, ANSWER_LEN = 128, 256


class Bench:
    """One target with one head, measured in every way."""

    def __init__(self, target: Target, head: Eagle3Head | None, options: argparse.Namespace):
        self.target, self.head, self.options = target, head, options
        self.answer_len = options.answer_len

    def engine(self, way: str, size: int) -> Engine:
        """`way` is plain, adaptive, or depth x width x budget of a fixed tree."""
        settings = EngineSettings(
            max_requests=size,
            max_pass_tokens=max(8192, size),
            cache_tokens=size * (PROMPT_LEN + self.answer_len + 256),
            share_prefixes=False,
            graphs=self.options.graphs,
        )
        if way == "plain":
            return Engine(self.target, settings=settings)
        assert self.head is not None
        rate, sibling = self.options.rate, self.options.sibling
        rule = None if rate is None else SyntheticWalk(rate, sibling)
        if way == "adaptive":
            depth, width, budget = self.options.tree
            tree = TreeSettings(depth=depth, width=width, budget=budget)
            settings = replace(settings, tree=tree)
            name = self.options.target or self.options.shape
            times = measure_pass_times(self.target, self.head, settings, name=name)
            return Engine(self.target, self.head, settings, times=times, measured_with=rule)
        depth, width, budget = map(int, way.split("x"))
        tree = TreeSettings(depth=depth, width=width, budget=budget)
        settings = replace(settings, tree=tree, controller="fixed")
        return Engine(self.target, self.head, settings, measured_with=rule)

    def used_gib(self) -> float:
        """Memory of the device that is taken."""
        if self.target.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info(self.target.device)
        return (total - free) / 2**30

    def cell(self, way: str, size: int) -> dict[str, Any]:
        """One batch size in one way."""
        engine = self.engine(way, size)
        chance = random.Random(size)
        top = min(40000, self.target.vocab_size - 1)
        prompts = [[chance.randrange(100, top) for _ in range(PROMPT_LEN)] for _ in range(size)]
        # Greedy texts do not depend on seeds, but the coins of synthetic drafts do.
        params = [
            SamplingParams(max_tokens=self.answer_len, ignore_eos=True, seed=seed)
            for seed in range(size)
        ]
        first = SamplingParams(max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        num_graphs = engine.capture_ahead(budget_s=self.options.capture_s)
        ahead_s = time.perf_counter() - started
        engine.generate(prompts, params)
        seconds, warm = [], engine.stats
        for _ in range(self.options.rounds):
            wait(self.target.device)
            started = time.perf_counter()
            answers = engine.generate(prompts, params)
            seconds.append(time.perf_counter() - started)
        before = engine.stats
        started = time.perf_counter()
        engine.generate(prompts, first)
        first_s = time.perf_counter() - started
        best = min(seconds)
        num_tokens = size * self.answer_len
        found = {
            "tokens_per_s": num_tokens / best,
            "decode_tokens_per_s": (num_tokens - size) / (best - first_s),
            "seconds": seconds,
            "first_token_s": first_s,
            "accept_length": sum(a.stats.accept_length for a in answers) / size,
            "cycles": before.num_passes,
            "target_s": before.target_s,
            "draft_s": before.draft_s,
            "other_s": before.other_s,
            "budgets": before.budgets,
            "captured_ahead": num_graphs,
            "capturing_ahead_s": ahead_s,
            "memory_gib": self.used_gib(),
            "timed_replayed": before.num_replayed - warm.num_replayed,
            "timed_launched": before.num_launched - warm.num_launched,
            "timed_captured": before.num_captured - warm.num_captured,
            "drains": engine._cycle.ahead.num_drains,
            "controller": before.controller,
        }
        del engine
        return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--head", type=Path, help="a head's directory; shapes have a random one")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--sibling", type=float, default=0.0)
    parser.add_argument("--ways", default="plain", help="plain,adaptive,5x1x5,...")
    parser.add_argument("--tree", type=lambda t: tuple(map(int, t.split("x"))), default=(6, 8, 40))
    parser.add_argument("--sizes", default="1,8,32,64,128,256")
    parser.add_argument("--answer-len", type=int, default=ANSWER_LEN)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=600.0, help="no new cell after it")
    parser.add_argument("--capture-s", type=float, default=45.0, help="for cycles captured ahead")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    target = load_once(options.target, options.shape, options.device, options.dtype)
    ways = options.ways.split(",")
    head = None
    if ways != ["plain"]:
        head = load_head(options.head) if options.head else random_head(target, options.draft_vocab)
    bench = Bench(target, head, options)
    is_cuda = target.device.type == "cuda"
    document: dict[str, Any] = {
        "what": "tokens per second by batch size",
        "target": Path(options.target).name if options.target else f"{options.shape}, random",
        "options": {name: str(value) for name, value in vars(options).items()},
        "cells": {},
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
        ),
    }
    ends = time.perf_counter() + options.budget_s
    for size in map(int, options.sizes.split(",")):
        for way in ways:
            if time.perf_counter() > ends:
                print(f"no time for {size} {way}", flush=True)
                continue
            found = bench.cell(way, size)
            document["cells"].setdefault(str(size), {})[way] = found
            shown = {k: round(v, 3) for k, v in found.items() if isinstance(v, int | float)}
            print(size, way, json.dumps(shown), flush=True)
            options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
