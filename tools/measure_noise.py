"""What it is worth to draft with the target's own noise, above temperature 0: with it and without.

    python tools/measure_noise.py --suite gsm8k --suite humaneval --suite mt-bench --out FILE.json

All prompts of a suite are answered together, by plain decoding and by the head with each shape of
trees, without copies. The texts must be equal. Accept lengths do not depend on the machine's speed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure_copies import spread
from measured_engines import tree_of

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.engine.head_drafter import HeadDrafter
from fledge.lab.suites import load_suite
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.shipped_heads import choose_head
from fledge.models.target import Target

FIRST_SEED = 7


def sampling_of(
    words: str, max_tokens: int, count: int, *, logprobs: int | None = None
) -> list[SamplingParams]:
    """Of a temperature, or a temperature and a top-p; each request has a seed of its own."""
    temperature, _, top_p = words.partition("/")
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_p=float(top_p or 1.0),
            seed=FIRST_SEED + number,
            logprobs=logprobs,
        )
        for number in range(count)
    ]


def answer(
    target: Target,
    head: Eagle3Head | None,
    shape: str,
    asked: Sequence[Any],
    params: Sequence[SamplingParams],
    *,
    has_noise: bool = False,
) -> tuple[float, list[tuple[int, ...]]]:
    """Accept length, and the answers."""
    settings = EngineSettings(
        tree=tree_of(shape), controller="fixed", copies=False, max_requests=len(asked)
    )
    drafter = None
    if head is not None:
        drafter = HeadDrafter(head, target, settings, has_noise=has_noise)
    engine = Engine(target, settings=settings, drafter=drafter)
    answers = engine.generate(asked, params)
    stats = [one.stats for one in answers]
    num_cycles = sum(one.cycles for one in stats)
    accept_length = (sum(one.num_tokens for one in stats) - len(stats)) / num_cycles
    return accept_length, [tuple(one.token_ids) for one in answers]


def measure(
    target: Target,
    head: Eagle3Head,
    shapes: Sequence[str],
    asked: Sequence[Any],
    params: Sequence[SamplingParams],
) -> dict[str, Any]:
    _, texts = answer(target, None, shapes[0], asked, params)
    found: dict[str, Any] = {"tokens": sum(len(one) for one in texts)}
    for shape in shapes:
        without, one = answer(target, head, shape, asked, params)
        noised, other = answer(target, head, shape, asked, params, has_noise=True)
        found[shape] = {
            "without": round(without, 4),
            "with_noise": round(noised, 4),
            "ratio": round(noised / without, 4),
            "same_texts": one == texts == other,
        }
    return found


def add_subject(
    parser: argparse.ArgumentParser, *, prompts: int, max_tokens: int, samplings: Sequence[str]
) -> None:
    """What is asked of whom, and where the figures go."""
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="default", help="a directory, or that of the target")
    parser.add_argument("--suite", action="append", required=True, help="as `fledge select` has it")
    parser.add_argument("--prompts", type=int, default=prompts, help="of each suite; 0 for all")
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--sampling", nargs="+", default=samplings, metavar="TEMPERATURE[/TOP_P]")
    parser.add_argument("--out", type=Path, required=True)


def load_pair(
    parser: argparse.ArgumentParser, options: argparse.Namespace, device: torch.device
) -> tuple[Target, Eagle3Head]:
    directory, _ = choose_head(options.head, options.target, None, device_kind=device.type)
    if directory is None:
        parser.error(f"{options.target} comes without a head; name one by --head.")
    resolved = resolve_target(options.target).directory
    target = Target.load(resolved, dtype=pick_dtype("auto", device), device=device)
    return target, fit_to_target(load_head(directory), target)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_subject(parser, prompts=12, max_tokens=64, samplings=["1.0", "0.7/0.9"])
    parser.add_argument("--trees", nargs="+", default=["7x1x7", "6x8x40"], metavar="DxWxB")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(words)
    device = pick_device(options.device)
    target, head = load_pair(parser, options, device)
    document = {
        "what": "accept length of drafts with the target's own noise and without",
        "target": Path(options.target).name,
        "head": options.head,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "seeds_from": FIRST_SEED,
        "cells": (cells := list[dict[str, Any]]()),
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        ),
    }
    for sampling in options.sampling:
        for name in options.suite:
            prompts = spread(load_suite(name).prompts, options.prompts)
            params = sampling_of(sampling, options.max_tokens, len(prompts))
            asked = [prompt.messages() for prompt in prompts]
            found = measure(target, head, options.trees, asked, params)
            cells.append({"sampling": sampling, "suite": Path(name).stem, **found})
            print(json.dumps(cells[-1]), flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
