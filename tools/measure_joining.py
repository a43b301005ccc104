"""What it costs that requests come and go: tokens per second with so many in flight all the time.

    python tools/measure_joining.py --target T --out benchmarks/FILE.json
    python tools/measure_joining.py --shape llama-8b --in-flight 64 --out benchmarks/FILE.json

Requests with prompts of 128 random tokens and answers of random lengths are added whenever one
ends, as a stage that regenerates answers does. The rate is compared with that of the same number of
requests that all decode and nobody comes or goes, and with it what reading the prompts must cost: a
run of the same prompts with answers of one token. Printed as it goes.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from capture_subjects import SHAPES, load_target

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance

PROMPT_LEN = 128


class Bench:
    """One engine, asked in different ways."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self._chance = random.Random(1)
        self._top = min(40000, engine.target.vocab_size - 1)

    def prompt(self) -> list[int]:
        return [self._chance.randrange(3, self._top) for _ in range(PROMPT_LEN)]

    def serve(self, lengths: Sequence[int]) -> dict[str, float]:
        """Answer so many requests of these lengths, a number of them in flight at a time."""
        engine, waiting = self.engine, list(lengths)
        before = _counts(engine)
        running: list[Any] = []
        started, first_s = time.perf_counter(), []
        while waiting or running:
            while waiting and len(running) < self.options.in_flight:
                params = SamplingParams(max_tokens=waiting.pop(), ignore_eos=True)
                running.append(engine.add(engine.make_request(self.prompt(), params)))
            engine.step()
            ended = [seq for seq in running if seq.has_ended]
            running = [seq for seq in running if not seq.has_ended]
            stats = [seq.completion().stats for seq in ended]
            first_s += [one.queue_s + one.prefill_s for one in stats]
        seconds = time.perf_counter() - started
        after = _counts(engine)
        return {
            "requests": len(lengths),
            "tokens_per_s": sum(lengths) / seconds,
            "seconds": seconds,
            "first_token_s": sorted(first_s)[len(first_s) // 2],
            **{name: after[name] - before[name] for name in after},
        }


def _counts(engine: Engine) -> dict[str, int]:
    ahead = engine._cycle.ahead
    return {
        "passes": engine.stats.num_passes,
        "drains": ahead.num_drains,
        "moves": ahead._steady.places.num_moves,
        "cold_runs": ahead._steady._graphs.num_cold,
    }


def measure(bench: Bench) -> dict[str, Any]:
    options = bench.options
    size, mean = options.in_flight, options.answer_len
    chance = random.Random(2)
    lengths = [chance.randrange(mean // 4, 2 * mean - mean // 4) for _ in range(options.requests)]
    found: dict[str, Any] = {}
    bench.serve(lengths[: 2 * size])  # captures and compiles
    prompts_only = bench.serve([1] * options.requests)
    # All begin together and end together: what is left without the prompts is decoding alone.
    together = [bench.serve([mean] * size) for _ in range(2)][-1]
    first = bench.serve([1] * size)
    decoding = size * (mean - 1) / (together["seconds"] - first["seconds"])
    joining = bench.serve(lengths)
    ideal_s = sum(lengths) / decoding + prompts_only["seconds"]
    found["decode_tokens_per_s"] = decoding
    found["prompts_only"], found["together"], found["joining"] = prompts_only, together, joining
    found["share_of_decoding"] = joining["tokens_per_s"] / decoding
    found["share_of_decoding_and_prompts"] = ideal_s / joining["seconds"]
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--answer-len", type=int, default=256)
    parser.add_argument("--pass-tokens", type=int, default=4096)
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    target = load_target(options.target, options.shape, options.device, options.dtype)
    settings = EngineSettings(
        max_requests=options.in_flight,
        max_pass_tokens=max(options.pass_tokens, options.in_flight),
        cache_tokens=options.in_flight * (PROMPT_LEN + 2 * options.answer_len + 64),
        share_prefixes=False,
        graphs=options.graphs,
    )
    found = measure(Bench(Engine(target, settings=settings), options))
    is_cuda = target.device.type == "cuda"
    document = {
        "what": "tokens per second while requests come and go",
        "target": Path(options.target).name if options.target else f"{options.shape}, random",
        "options": {name: str(value) for name, value in vars(options).items()},
        **found,
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
        ),
    }
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in document.items() if k != "provenance"}, indent=2))


if __name__ == "__main__":
    main()
