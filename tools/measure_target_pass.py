"""What a target pass costs against the number of tokens in it, on our layers and transformers'.

    python tools/measure_target_pass.py --target smollm2-135m-instruct --out benchmarks/FILE.json
    python tools/measure_target_pass.py --shape llama-8b --out benchmarks/FILE.json

A pass reads a chain of tokens behind a context, with logits for all of them: what verifying a chain
costs. The two paths take turns, so that both meet the same neighbours on the machine; the fastest
round of each counts. On CUDA a pass is timed as it is launched and as a captured graph. On a CPU
`--generate N` also lets the engine without a head and transformers' generate write the same N
tokens by turns. Rows that differ when others are beside them are counted too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from capture_subjects import SHAPES, load_target
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.engine.memory import probe_bytes_per_slot
from fledge.models.attention import ATTENTION_NAME
from fledge.models.target import Target
from fledge.models.target_path import TargetPath, choose_target_path
from fledge.ops.kv import KVGroups
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass

PATHS: tuple[TargetPath, ...] = ("fast", "plain")
BLOCK = 16


class Bench:
    """One request with a context, whose next tokens are read again and again."""

    def __init__(self, target: Target, context: int, most_tokens: int) -> None:
        self.target, self.context = target, context
        blocks = -(-(context + most_tokens) // BLOCK) + 1
        windows = probe_bytes_per_slot(target)
        table_BP = torch.arange(blocks, device=target.device)[None]
        self.tables = BlockTables(BLOCK, dict.fromkeys(windows, table_BP))
        self.memories: dict[TargetPath, KVGroups] = {}
        for path in PATHS:
            self.memories[path] = KVGroups(dict.fromkeys(windows, blocks * BLOCK))
            with choose_target_path(path):
                target.forward(self.packed(0, context), self.memories[path])

    def packed(self, context: int, num_tokens: int) -> TreePass:
        device = self.target.device
        numbers = torch.arange(context, context + num_tokens, device=device)
        return make_tree_pass(
            chain_tokens_C=numbers * 7919 % (self.target.vocab_size - 100) + 50,
            chain_B=torch.tensor([num_tokens], device=device),
            context_B=torch.tensor([context], device=device),
            trees=None,
            num_rows=num_tokens,
            tables=self.tables,
            num_short=1,
        )

    def run(self, path: TargetPath, num_tokens: int) -> Tensor:
        with choose_target_path(path):
            packed = self.packed(self.context, num_tokens)
            return self.target.forward(packed, self.memories[path]).logits_RV

    def captured(self, path: TargetPath, num_tokens: int) -> Callable[[], None] | None:
        """The same pass as a graph; None where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        packed = self.packed(self.context, num_tokens)
        try:
            with choose_target_path(path), torch.cuda.graph(graph):
                self.target.forward(packed, self.memories[path])
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph.replay


def timed_s(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started, used = time.perf_counter(), time.process_time()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, time.process_time() - used


def graph_s(replay: Callable[[], None], rounds: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(rounds):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds / 1e3


def curve(bench: Bench, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds by path and tokens of a pass."""
    device = bench.target.device
    samples: dict[tuple[TargetPath, int], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for num_tokens in sizes:
            for path in PATHS if turn % 2 else PATHS[::-1]:
                sample = timed_s(lambda p=path, n=num_tokens: bench.run(p, n), device)
                if turn:  # the first round compiles and warms up
                    samples.setdefault((path, num_tokens), []).append(sample)
    found: dict[str, Any] = {}
    for (path, num_tokens), pairs in samples.items():
        wall, used = zip(*pairs, strict=True)
        cell = {
            "best_ms": 1e3 * min(wall),
            "median_ms": 1e3 * statistics.median(wall),
            "processor_ms": 1e3 * min(used),
        }
        if device.type == "cuda":
            replay = bench.captured(path, num_tokens)
            cell["graph_ms"] = None if replay is None else 1e3 * graph_s(replay, rounds)
        found.setdefault(path, {})[str(num_tokens)] = cell
        print(path, num_tokens, json.dumps(cell), flush=True)
    return found


def company(bench: Bench, sizes: Sequence[int]) -> dict[str, Any]:
    """How far the first row's logits move when other rows are beside it."""
    found: dict[str, Any] = {}
    for path in PATHS:
        alone = bench.run(path, 1)[0].double()
        others = {size: bench.run(path, size)[0].double() for size in sizes if size > 1}
        found[path] = {
            "rows_with_other_bits": [size for size, row in others.items() if not row.equal(alone)],
            "largest_difference": max(float((row - alone).abs().max()) for row in others.values()),
        }
    return found


def generation(target: Target, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of both by turns, prompts included, and whether the texts are equal."""
    ids = (torch.arange(32) * 7919 % (target.vocab_size - 100) + 50)[None].to(target.device)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine = Engine(target, settings=EngineSettings(max_requests=1, share_prefixes=False))
    texts: dict[str, list[int]] = {}

    def by_engine() -> None:
        texts["fledge"] = list(engine.generate([ids[0].tolist()], params)[0].token_ids)

    def by_transformers() -> None:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts["transformers"] = output[0, ids.shape[1] :].tolist()

    model = target._model
    options = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    ways = {"fledge": by_engine, "transformers": by_transformers}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    model.set_attn_implementation("sdpa")
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                samples[name].append(timed_s(way, target.device))
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    is_same = texts["fledge"] == texts["transformers"]
    result: dict[str, Any] = {"tokens": num_tokens, "same_tokens": is_same}
    for name, pairs in samples.items():
        wall, used = zip(*pairs, strict=True)
        result[name] = {
            "tokens_per_s": num_tokens / min(wall),
            "median_tokens_per_s": num_tokens / statistics.median(wall),
            "tokens_per_processor_s": num_tokens / min(used),
        }
    print("generate", json.dumps(result), flush=True)
    return result


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", default="", help="on a CPU: 1,2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--generate", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    target = load_target(options.target, options.shape, options.device, options.dtype)
    sizes = [int(one) for one in options.tokens.split(",")]
    is_cuda = target.device.type == "cuda"
    document: dict[str, Any] = {
        "what": "time of a target pass by tokens in it",
        "target": Path(options.target).name if options.target else f"{options.shape}, random",
        "dtype": str(target.dtype),
        "context": options.context,
        "why_plain": target.why_plain,
        "threads": {},
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
        ),
    }
    for threads in options.threads.split(",") if options.threads else [""]:
        if threads:
            torch.set_num_threads(int(threads))
        bench = Bench(target, options.context, max(sizes))
        found = {"passes": curve(bench, sizes, options.rounds), "company": company(bench, sizes)}
        if options.generate:
            found["generate"] = generation(target, options.generate, options.rounds)
        document["threads"][threads or str(torch.get_num_threads())] = found
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
