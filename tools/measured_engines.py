"""What the tools for a CUDA device measure: a target with a head, engines over them, results.

A shape has random weights and a random head whose drafts are right by chance, so that what is
measured is the engine and not the head. Results are printed and written cell by cell: a run that is
cut short has still measured something.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from capture_subjects import SHAPES, load_target

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.contracts.settings import GraphsChoice
from fledge.engine.sequence import Sequence as Running
from fledge.engine.timing import measure_pass_times
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.target import Target
from fledge.ops.synthetic_walk import SyntheticWalk

PLAIN, ADAPTIVE = "plain", "adaptive"
USUAL_RATE = 0.777


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def chances(words: str) -> float | tuple[float, ...]:
    """One for all depths, or one for each with commas."""
    found = tuple(float(word) for word in words.split(","))
    return found if len(found) > 1 else found[0]


def tree_of(way: str) -> TreeSettings:
    """Of depth x width x budget."""
    depth, width, budget = numbers(way.replace("x", ","))
    return TreeSettings(depth=depth, width=width, budget=budget)


def option_parser(description: str, *, budget_s: float) -> argparse.ArgumentParser:
    """Options of every tool that measures engines."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--head", type=Path, help="a head's directory; a random one without")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument(
        "--rate", type=chances, help="of a draft, or one a depth; 0.777 for a random head"
    )
    parser.add_argument("--sibling", type=float, default=0.3, help="chance of those beside it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="no new cell after it")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    return parser


@lru_cache(maxsize=1)
def load_once(name: str | None, shape: str, device: str, dtype: str) -> Target:
    """For several measurements in one process."""
    return load_target(name, shape, device, dtype)


def random_head(target: Target, draft_vocab_size: int) -> Eagle3Head:
    """A head of the target's own shape whose weights mean nothing."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    shape = HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        max_position_embeddings=target.context_len,
    )
    torch.manual_seed(1)
    return Eagle3Head(shape).to(target.device, target.dtype)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio_of(some: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """That of medians over rounds by turns, with the 95% interval of resampled rounds."""
    chance = random.Random(0)
    pairs = list(zip(some, others, strict=True))

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        one, other = zip(*chosen, strict=True)
        return statistics.median(one) / statistics.median(other)

    drawn = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {"ratio": ratio(pairs), "low": drawn[25], "high": drawn[974]}


class Subject:
    """A target and a head, and engines over them."""

    def __init__(self, target: Target, head: Eagle3Head | None, options: argparse.Namespace):
        self.target, self.head, self.options = target, head, options
        rate = options.rate
        if rate is None and head is not None and options.head is None:
            rate = USUAL_RATE
        self.rule = None if rate is None else SyntheticWalk(rate, options.sibling)
        self.name: str = Path(options.target).name if options.target else options.shape

    @classmethod
    def load(cls, options: argparse.Namespace, *, has_head: bool) -> "Subject":
        target = load_once(options.target, options.shape, options.device, options.dtype)
        head = None
        if has_head and options.head:
            head = fit_to_target(load_head(options.head), target)
        elif has_head:
            head = random_head(target, options.draft_vocab)
        return cls(target, head, options)

    def engine(
        self,
        way: str,
        size: int,
        tokens_each: int,
        *,
        graphs: GraphsChoice = "auto",
        waits_for_cycles: bool = False,
    ) -> Engine:
        """`way` is plain, adaptive (6x8x40 at most), or depth x width x budget of a fixed tree."""
        settings = EngineSettings(
            max_requests=size,
            max_pass_tokens=max(8192, size),
            cache_tokens=size * (tokens_each + 256),
            share_prefixes=False,
            controller="adaptive" if way == ADAPTIVE else "fixed",
            graphs=graphs,
            copies=self.rule is None,  # drafts that are right by chance are a head's
        )
        if way == PLAIN:
            return Engine(self.target, settings=settings, waits_for_cycles=waits_for_cycles)
        assert self.head is not None
        times = None
        if way == ADAPTIVE:
            times = measure_pass_times(self.target, self.head, settings, name=self.name)
        else:
            settings = replace(settings, tree=tree_of(way))
        return Engine(
            self.target,
            self.head,
            settings,
            times=times,
            measured_with=self.rule,
            waits_for_cycles=waits_for_cycles,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random tokens."""
        chance = random.Random(count)
        top = min(40000, self.target.vocab_size - 1)
        return [
            [chance.randrange(min(100, top // 2), top) for _ in range(length)] for _ in range(count)
        ]


class Decoding:
    """Requests that decode together with no end in sight."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.engine = engine
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
            for seed in range(len(prompts))
        ]
        self.sequences: list[Running] = [
            engine.add(engine.make_request(list(prompt), one))
            for prompt, one in zip(prompts, params, strict=True)
        ]

    def settle(self, cycles: int = 10) -> None:
        """Until prompts are read, and cycles are captured where they are."""
        while not all(seq.is_decoding for seq in self.sequences):
            self.engine.step()
        self.run(cycles)

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self.engine.step()

    def timed(self, cycles: int) -> dict[str, float]:
        """Seconds and tokens of so many cycles; every step reads one that was started before."""
        said = self.num_said
        started = time.perf_counter()
        self.run(cycles)
        seconds = time.perf_counter() - started
        assert not any(seq.has_ended for seq in self.sequences), "a request ended on the way"
        tokens = self.num_said - said
        return {
            "cycle_s": seconds / cycles,
            "tokens_per_s": tokens / seconds,
            "tokens_per_cycle_and_request": tokens / cycles / len(self.sequences),
        }

    @property
    def num_said(self) -> int:
        return sum(len(seq.output_ids) for seq in self.sequences)

    def close(self) -> None:
        self.engine.abort(self.sequences)
        wait(self.engine.target.device)


class Results:
    """A document that is on the disk after every cell, and the time there is for it."""

    def __init__(self, what: str, subject: Subject, **facts: Any) -> None:
        options, target = subject.options, subject.target
        is_cuda = target.device.type == "cuda"
        self._path, self._ends = options.out, time.perf_counter() + options.budget_s
        self.document: dict[str, Any] = {
            "what": what,
            "target": subject.name if options.target else f"{subject.name}, random weights",
            "head": Path(options.head).name if options.head else "random",
            "dtype": str(target.dtype).removeprefix("torch."),
            "drafts": "the target's own choice" if subject.rule is None else str(subject.rule),
            **facts,
            "cells": {},
            "provenance": provenance.collect(
                device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
            ),
        }

    def left(self, cells: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Cells, for as long as there is time for them."""
        for number, cell in enumerate(cells):
            if time.perf_counter() > self._ends:
                print(f"no time for {cells[number:]}", flush=True)
                self.document["left_out"] = [list(one) for one in cells[number:]]
                self.save()
                return
            yield cell

    def add(self, names: Sequence[object], found: dict[str, Any]) -> None:
        """A cell under names from the outside in."""
        place = self.document["cells"]
        for name in names[:-1]:
            place = place.setdefault(str(name), {})
        place[str(names[-1])] = found
        shown = {k: round(v, 5) for k, v in found.items() if isinstance(v, float)}
        print(*names, json.dumps(shown), flush=True)
        self.save()

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
