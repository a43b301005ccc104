"""What drafts that are copied from the text before are worth: with them, without, and plain.

    python tools/measure_copies.py --head HEAD --suite gsm8k --suite humaneval --out FILE.json

Chains, greedy, one request at a time; all ways answer the same prompts in turns,
each prompt twice, and the faster time counts. The texts must be equal.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.contracts.outputs import Completion
from fledge.contracts.settings import CONTROLLERS
from fledge.engine.timing import measure_pass_times
from fledge.lab.suites import load_suite
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target

ROUNDS = 2


def engines(options: argparse.Namespace, target: Target) -> dict[str, Engine]:
    tree = TreeSettings(depth=options.depth, width=1, budget=options.depth)
    settings = EngineSettings(
        tree=tree,
        controller=options.controller,
        max_requests=1,
        share_prefixes=False,
        cache_tokens=8192,
    )
    head, times = fit_to_target(load_head(options.head), target), None
    if options.controller == "adaptive":
        times = measure_pass_times(target, head, settings, name=options.target)
    return {
        "plain": Engine(target, None, settings),
        "head": Engine(target, head, replace(settings, copies=False), times=times),
        "copies": Engine(target, head, settings, times=times),
    }


def spread(prompts: Sequence[Any], count: int) -> list[Any]:
    """So many of them, from the first to the last at equal distances."""
    count = min(count, len(prompts)) or len(prompts)
    return [prompts[place * len(prompts) // count] for place in range(count)]


class Tally:
    """Answers of one way to the prompts of one task."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.answers: list[Completion] = []

    def figures(self) -> dict[str, Any]:
        stats = [one.stats for one in self.answers]
        cycles = sum(one.cycles for one in stats)
        num_tokens = sum(one.num_tokens for one in stats)
        return {
            "tokens": num_tokens,
            "tokens_per_s": round(num_tokens / self.seconds, 2),
            "accept_length": round((num_tokens - len(stats)) / cycles, 4),
            "copies_offered": sum(one.num_copies_offered for one in stats),
            "copies_accepted": sum(one.num_copies_accepted for one in stats),
        }


def measure(ways: dict[str, Engine], asked: Sequence[Any], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=max_tokens)
    tallies = {name: Tally() for name in ways}
    for messages in asked:
        best: dict[str, tuple[float, Completion]] = {}
        for number in range(ROUNDS):
            for name, engine in reversed(ways.items()) if number % 2 else ways.items():
                started = time.perf_counter()
                (answer,) = engine.generate([messages], params)
                found = (time.perf_counter() - started, answer)
                best[name] = min(best.get(name, found), found, key=lambda one: one[0])
        for name, (seconds, answer) in best.items():
            tallies[name].seconds += seconds
            tallies[name].answers.append(answer)
    texts = [[one.token_ids for one in tally.answers] for tally in tallies.values()]
    figures = {name: tally.figures() for name, tally in tallies.items()}
    return {**figures, "same_texts": all(one == texts[0] for one in texts)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--suite", action="append", required=True, help="as `fledge select` has it")
    parser.add_argument("--prompts", type=int, default=8, help="of each suite; 0 for all")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--controller", choices=CONTROLLERS, default="fixed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    device = pick_device(options.device)
    directory = resolve_target(options.target).directory
    target = Target.load(directory, dtype=pick_dtype("auto", device), device=device)
    ways, tasks = engines(options, target), {}
    for engine in ways.values():
        engine.generate(["Name three rivers."], SamplingParams(max_tokens=32))
    for name in options.suite:
        prompts = spread(load_suite(name).prompts, options.prompts)
        asked = [prompt.messages() for prompt in prompts]
        tasks[Path(name).stem] = measure(ways, asked, options.max_tokens)
        print(Path(name).stem, json.dumps(tasks[Path(name).stem]), flush=True)
    is_cuda = device.type == "cuda"
    document = {
        "what": "greedy chains with copied drafts and without, by turns",
        "target": Path(options.target).name,
        "head": options.head.name,
        "depth": options.depth,
        "controller": options.controller,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "tasks": tasks,
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name(device) if is_cuda else "cpu"
        ),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
