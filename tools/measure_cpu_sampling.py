"""Sampling on a CPU: the ordinary way, native cycles, and native cycles with a head, by turns.

    python tools/measure_cpu_sampling.py --suite gsm8k --suite humaneval --out FILE.json

Every way answers the same prompts with the same seeds in float32, one request at a time, and they
take turns prompt by prompt, so that all meet the same neighbours on the machine. Times are those
of decoding: prompts are read alike. The texts must be equal. The head drafts as far as pays.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure_copies import spread
from measure_noise import add_subject, sampling_of

from fledge import Engine, EngineSettings
from fledge.contracts import provenance
from fledge.lab.suites import load_suite

ORDINARY, NATIVE, HEAD = "ordinary, without a head", "native, without a head", "native, head"


def make_engines(target: str, head: str) -> dict[str, Engine]:
    """One engine of each way, over one target."""
    settings = EngineSettings(max_requests=1, share_prefixes=False)
    drafting = Engine.load(target, head, settings, dtype="float32", device="cpu")
    engines = {name: Engine(drafting.target, settings=settings) for name in (ORDINARY, NATIVE)}
    # Nobody else wants to do without: what it would be for is what is measured here.
    engines[ORDINARY]._cycle.host._is_on = False
    return {**engines, HEAD: drafting}


def measure(engines: dict[str, Engine], asked: Sequence[Any], params: Sequence[Any]) -> Any:
    """Tokens per second of each way, and how many texts are the same."""
    seconds = dict.fromkeys(engines, 0.0)
    num_tokens = num_cycles = num_same = 0
    for prompt, one in zip(asked, params, strict=True):
        texts = {}
        for name, engine in engines.items():
            (answer,) = engine.generate([prompt], one)
            seconds[name] += answer.stats.decode_s
            texts[name] = tuple(answer.token_ids)
            if name == HEAD:
                num_cycles += answer.stats.cycles
        num_tokens += len(texts[NATIVE]) - 1  # the first one is the prompt's
        num_same += len(set(texts.values())) == 1
    rates = {name: num_tokens / taken for name, taken in seconds.items()}
    return {
        "num_tokens": num_tokens,
        "same_texts": f"{num_same} of {len(asked)}",
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "native_over_ordinary": round(rates[NATIVE] / rates[ORDINARY], 3),
        "head_over_native": round(rates[HEAD] / rates[NATIVE], 3),
        "accept_length": round(num_tokens / num_cycles, 3),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_subject(parser, prompts=6, max_tokens=96, samplings=["0.0", "1.0", "0.7/0.9"])
    options = parser.parse_args(words)
    engines = make_engines(options.target, options.head)
    cells: list[dict[str, Any]] = []
    for sampling in options.sampling:
        for name in options.suite:
            prompts = spread(load_suite(name).prompts, options.prompts)
            asked = [prompt.messages() for prompt in prompts]
            params = sampling_of(sampling, options.max_tokens, len(prompts))
            if not cells:  # kernels and memory are met for the first time
                measure(engines, asked[:1], params[:1])
            found = measure(engines, asked, params)
            cells.append({"sampling": sampling, "suite": Path(name).stem, **found})
            print(json.dumps(cells[-1]), flush=True)
    document = {
        "what": "sampling on a CPU, one request at a time: ways by turns",
        "target": Path(options.target).name,
        "head": options.head,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "cells": cells,
        "controller": engines[HEAD].stats.controller,
        "provenance": provenance.collect(device="cpu"),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
