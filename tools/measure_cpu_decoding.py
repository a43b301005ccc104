"""Decoding on a CPU: transformers' generate, ours, and ours with a head, by turns on one machine.

    python tools/measure_cpu_decoding.py --target smollm2-135m-instruct --head HEAD --out FILE.json

Every way answers the same prompts greedily in float32, one at a time, and they take turns prompt by
prompt, so that all meet the same neighbours on the machine. Times include reading the prompt. The
texts must be equal. A head drafts chains of a fixed length, and as far as pays. `--passes` also
times a pass over 1 to 32 tokens: native and plain with all logits (the fastest), and native with
the best token of each row alone, as chains are verified, over parts of an answer (the median).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure_target_pass import Bench

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.engine.timing import measure_pass_times
from fledge.models.attention import ATTENTION_NAME
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.native_passes import ChainPasses
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.ops.kernel_choice import KernelChoice, choose_kernels
from fledge.ops.native_chains import TokenChain

PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "In three sentences, explain how a young eagle learns to fly.",
)
SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
CONTEXT = 128
CHOICES: dict[str, KernelChoice] = {"native": "auto", "plain": "plain"}


def shape_of(text: str) -> TreeSettings:
    depth, width, budget = (int(one) for one in text.split("x"))
    return TreeSettings(depth=depth, width=width, budget=budget)


class Ways:
    """The ways that are compared; each returns token ids and the accept length."""

    def __init__(self, target: Target, head: Path | None, shape: str, max_tokens: int) -> None:
        self.target, self.max_tokens = target, max_tokens
        one = {"max_requests": 1, "share_prefixes": False}
        self.plain = Engine(target, settings=EngineSettings(**one))
        self.by_name: dict[str, Callable[[list[int]], tuple[list[int], float]]] = {
            "transformers": self.transformers,
            "plain": lambda ids: self.engine(self.plain, ids),
        }
        if head is not None:
            settings = EngineSettings(**one, controller="fixed", tree=shape_of(shape))
            drafting = Engine(target, load_head(head), settings)
            self.by_name["head"] = lambda ids: self.engine(drafting, ids)
            usual = EngineSettings(**one)
            fitted = fit_to_target(load_head(head), target)
            times = measure_pass_times(target, fitted, usual, name="measured")
            adaptive = Engine(target, fitted, usual, times=times)
            self.by_name["head, adaptive"] = lambda ids: self.engine(adaptive, ids)

    def engine(self, engine: Engine, ids: list[int]) -> tuple[list[int], float]:
        (answer,) = engine.generate([ids], SamplingParams(max_tokens=self.max_tokens))
        return list(answer.token_ids), answer.stats.accept_length

    def transformers(self, ids: list[int]) -> tuple[list[int], float]:
        model, rows = self.target._model, torch.tensor([ids])
        model.set_attn_implementation("sdpa")
        try:
            output = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=self.max_tokens,
            )
        finally:
            model.set_attn_implementation(ATTENTION_NAME)
        return output[0, len(ids) :].tolist(), 1.0


def decoding(ways: Ways, rounds: int) -> dict[str, Any]:
    tokenizer = ways.target.tokenizer
    asked = [tokenizer.encode_prompt(text) for text in PROMPTS]
    seconds: dict[str, list[float]] = {name: [] for name in ways.by_name}
    answers: dict[str, list[list[int]]] = {name: [] for name in ways.by_name}
    lengths: dict[str, list[float]] = {name: [] for name in ways.by_name}
    for turn in range(rounds + 1):
        spent = dict.fromkeys(ways.by_name, 0.0)
        for ids in asked:
            for name, way in ways.by_name.items():
                started = time.perf_counter()
                tokens, length = way(ids)
                spent[name] += time.perf_counter() - started
                if turn == 1:
                    answers[name].append(tokens)
                    lengths[name].append(length)
        for name, total in spent.items():
            if turn:  # the first round warms up
                seconds[name].append(total)
        print(turn, {name: round(total, 2) for name, total in spent.items()}, flush=True)
    num_tokens = sum(len(one) for one in answers["plain"])
    return {
        "tokens": num_tokens,
        "same_tokens": all(one == answers["transformers"] for one in answers.values()),
        "ways": {
            name: {
                "tokens_per_s": num_tokens / min(values),
                "median_tokens_per_s": num_tokens / statistics.median(values),
                "accept_lengths": lengths[name],
            }
            for name, values in seconds.items()
        },
    }


def passes(target: Target, rounds: int, text: list[int]) -> dict[str, Any]:
    """Milliseconds of a pass behind about 128 tokens, by tokens in it."""
    bench = Bench(target, CONTEXT, max(SIZES))
    found: dict[str, dict[str, float]] = {name: {} for name in CHOICES}
    if target.chain_native() is not None:
        found["native, best tokens"] = best_token_passes(target, bench, rounds, text)
    for num_tokens in SIZES:
        for name, choice in CHOICES.items():
            times = []
            with choose_kernels(choice):
                for _ in range(rounds + 1):
                    started = time.perf_counter()
                    bench.run("fast", num_tokens)
                    times.append(time.perf_counter() - started)
            found[name][str(num_tokens)] = 1e3 * min(times[1:])
        print(num_tokens, found["native"][str(num_tokens)], flush=True)
    return found


def best_token_passes(
    target: Target, bench: Bench, rounds: int, text: list[int]
) -> dict[str, float]:
    """Median milliseconds over parts of an answer, each with what came before it, where the best
    token of each row is all that is asked for."""
    native = target.chain_native()
    assert native is not None
    ways = ChainPasses(
        native,
        target.embedding,
        bench.memories["fast"],
        bench.tables,
        (),
        max_requests=1,
        max_rows=max(SIZES),
        num_features=0,
    )
    for begin in range(0, len(text), max(SIZES)):
        ways.run([TokenChain(0, begin, text[begin : begin + max(SIZES)])])
    found = {}
    for num_tokens in SIZES:
        times = []
        for turn in range(rounds + 1):
            # Another part of the text each time: some tokens are surer than others.
            begin = len(text) - num_tokens - turn * 3
            chain = TokenChain(0, begin, text[begin : begin + num_tokens])
            started = time.perf_counter()
            ways.run([chain])
            times.append(time.perf_counter() - started)
        found[str(num_tokens)] = 1e3 * statistics.median(times[1:])
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--shape", default="4x1x4", help="depth x width x budget of the trees")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    directory = resolve_target(options.target).directory
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    ways = Ways(target, options.head, options.shape, options.max_tokens)
    document: dict[str, Any] = {
        "what": "greedy decoding on a CPU in float32, by turns",
        "target": Path(options.target).name,
        "head": options.head.name if options.head else None,
        "shape": options.shape,
        "threads": torch.get_num_threads(),
        "decoding": decoding(ways, options.rounds),
        "provenance": provenance.collect(device="cpu"),
    }
    if options.passes:
        text = target.tokenizer.encode_prompt(PROMPTS[0])
        (answer,) = ways.plain.generate([text], SamplingParams(max_tokens=CONTEXT + max(SIZES)))
        text = [*text, *answer.token_ids][: CONTEXT + max(SIZES)]
        document["pass_ms"] = passes(target, 8, text)
    print(json.dumps(document["decoding"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
