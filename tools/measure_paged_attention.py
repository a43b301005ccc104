"""Time of paged attention in one layer, against the plain path and against what the device allows.

    python tools/measure_paged_attention.py --out benchmarks/FILE.json

Each cell is a pass of so many requests with trees of so many nodes over contexts of one length. The
kernel is replayed from a captured graph over several layers, so that keys and values come from
memory and not from the cache of the device. `limit` is the larger of two times: reading every key
and value once at the copy bandwidth measured here, and the products at the rate measured here.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.contracts import provenance
from fledge.models.attention import attend_stored
from fledge.ops.attention import AttentionSpec
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.tree import TreeBatch

BLOCK_SIZE, TABLE_TOKENS, MOST_LAYERS = 16, 4096, 200
CACHE_BYTES, MOST_BYTES = 300e6, 20e9
"""Keys and values of all layers: more than any cache of the device, less than its memory."""


@dataclass(frozen=True)
class Cell:
    """`nodes` rows of a tree for each request, or one chunk of a prompt."""

    requests: int
    nodes: int
    context: int
    chunk: int = 1

    @property
    def rows(self) -> int:
        return self.chunk - 1 + self.nodes


CELLS = [
    *(Cell(requests, 1, 200) for requests in (64, 1, 8, 32, 128, 256)),
    *(Cell(requests, 6, 350) for requests in (64, 1, 8, 32)),
    *(Cell(requests, 25, 400) for requests in (1, 8, 64)),
    *(Cell(requests, 64, 512) for requests in (1, 8)),
    *(Cell(requests, 1, 4096) for requests in (1, 8, 64)),
    *(Cell(1, 1, context) for context in (2048, 8192, 32_768)),
    Cell(1, 1, 0, chunk=2048),
    Cell(1, 1, 4096, chunk=2048),
    *(Cell(requests, nodes, 400) for nodes in (2, 4) for requests in (8, 64)),
]


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    size: int
    dtype: torch.dtype


def wide_trees(cell: Cell, device: torch.device) -> TreeBatch | None:
    """Each node below the one half its number: half of the nodes are leaves."""
    if cell.nodes == 1:
        return None
    parents_N = (torch.arange(cell.nodes, device=device) - 1).clamp(min=0) // 2
    parents_BN = parents_N.repeat(cell.requests, 1)
    return TreeBatch(
        tokens_BN=torch.zeros_like(parents_BN),
        parents_BN=parents_BN,
        sizes_B=torch.full((cell.requests,), cell.nodes, device=device),
        logprobs_BN=torch.zeros_like(parents_BN, dtype=torch.float32),
        num_drafts=cell.requests * (cell.nodes - 1),
    )


def pass_of(cell: Cell, device: torch.device) -> TreePass:
    width = -(-(cell.context + cell.rows) // BLOCK_SIZE)
    blocks = torch.randperm(cell.requests * width, device=device)
    return make_tree_pass(
        chain_tokens_C=torch.zeros(cell.requests * cell.chunk, dtype=torch.long, device=device),
        chain_B=torch.full((cell.requests,), cell.chunk, device=device),
        context_B=torch.full((cell.requests,), cell.context, device=device),
        trees=wide_trees(cell, device),
        num_rows=cell.requests * cell.rows,
        tables=BlockTables(BLOCK_SIZE, {None: blocks.view(cell.requests, width)}),
        num_short=cell.requests if cell.rows <= 64 else 0,
    )


def widened(packed: TreePass) -> TreePass:
    """As an engine's tables are: wide enough for the longest request that may come."""
    table_BP = packed.tables.by_window[None]
    width = max(TABLE_TOKENS // packed.tables.block_size, -(-table_BP.shape[1] // 16) * 16)
    wide_BP = torch.full((table_BP.shape[0], width), -1, device=table_BP.device)
    wide_BP[:, : table_BP.shape[1]] = table_BP
    tables = replace(packed.tables, by_window={None: wide_BP})
    return replace(packed, tables=tables, views={})


class Bench:
    """A pass, memory of several layers, and what goes in."""

    def __init__(self, cell: Cell, heads: Heads, device: torch.device) -> None:
        self.cell, self.heads = cell, heads
        made = pass_of(cell, device)
        num_slots = made.tables.by_window[None].numel() * BLOCK_SIZE
        self.packed = widened(made)
        layer_bytes = num_slots * 2 * heads.key * heads.size * heads.dtype.itemsize
        self.num_layers = max(1, min(MOST_LAYERS, int(CACHE_BYTES // layer_bytes) + 1))
        self.pool = KVPool(num_slots)
        shape = (heads.key, heads.size)
        for layer in range(self.num_layers):
            keys = torch.randn(num_slots, *shape, device=device, dtype=heads.dtype)
            self.pool.write(layer, torch.arange(num_slots, device=device), keys, keys)
        num_rows = self.packed.num_tokens
        self.query = torch.randn(
            num_rows, heads.query, heads.size, device=device, dtype=heads.dtype
        )
        self.spec = AttentionSpec(heads.size**-0.5)

    @property
    def num_bytes(self) -> int:
        seen = self.cell.requests * (self.cell.context + self.cell.rows)
        return seen * 2 * self.heads.key * self.heads.size * self.heads.dtype.itemsize

    @property
    def num_operations(self) -> int:
        """Products of scores and outputs; rows of a chunk see half of it on average."""
        seen = self.cell.context + self.cell.rows // (2 if self.cell.chunk > 1 else 1)
        return 4 * self.packed.num_tokens * seen * self.heads.query * self.heads.size

    def run(self) -> None:
        for layer in range(self.num_layers):
            self.layer(layer)

    def layer(self, layer: int) -> Tensor:
        return attend_stored(self.packed, self.pool, layer, self.query, self.spec)

    def kernel_us(self, rounds: int = 5) -> float:
        """A layer, from a captured graph."""
        with choose_kernels("triton"):
            self.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
        graph.replay()
        return timed_us(graph.replay, rounds) / self.num_layers

    def plain_us(self) -> float:
        with choose_kernels("plain"):
            self.layer(0)
            num_layers = min(self.num_layers, 4)
            return timed_us(lambda: [self.layer(i) for i in range(num_layers)], 2) / num_layers

    def error(self) -> float:
        """Relative difference of the two paths."""
        with choose_kernels("triton"):
            ours = self.layer(0).float()
        with choose_kernels("plain"):
            theirs = self.layer(0).float()
        return float((ours - theirs).norm() / theirs.norm())


def timed_us(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def device_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and operations a second, of a large copy and a large product."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    copy_us = timed_us(lambda: target.copy_(source), 5)
    left = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    left @ left
    product_us = timed_us(lambda: left @ left, 5)
    return 2 * 2**30 / copy_us * 1e6, 2 * 8192**3 / product_us * 1e6


def measure(bench: Bench, limits: tuple[float, float]) -> dict[str, Any]:
    cell = bench.cell
    limit_us = 1e6 * max(bench.num_bytes / limits[0], bench.num_operations / limits[1])
    kernel_us = bench.kernel_us()
    found: dict[str, Any] = {
        "requests": cell.requests,
        "nodes": cell.nodes,
        "context": cell.context,
        "chunk": cell.chunk,
        "kernel_us": round(kernel_us, 1),
        "limit_us": round(limit_us, 1),
        "share_of_limit": round(limit_us / kernel_us, 3),
    }
    # The plain path copies every key for every query head and keeps all scores.
    heads = bench.heads
    scores = 4 * bench.packed.num_tokens * (cell.context + cell.rows) * heads.query
    copies = bench.num_bytes * heads.query // heads.key
    if 2 * scores + 2 * copies < MOST_BYTES:
        found["relative_difference"] = float(f"{bench.error():.2e}")
        found["plain_us"] = round(bench.plain_us(), 1)
        found["speed_up"] = round(found["plain_us"] / kernel_us, 2)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=600.0, help="no new cell after it")
    parser.add_argument("--heads", default="32,8,128", help="query heads, key heads, head size")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    args = parser.parse_args()
    device = torch.device("cuda")
    heads = Heads(*(int(one) for one in args.heads.split(",")), getattr(torch, args.dtype))
    limits = device_limits(heads.dtype)
    say(f"copies {limits[0] / 1e12:.2f} TB/s, products {limits[1] / 1e12:.0f} TFLOP/s")
    results = []
    started = time.perf_counter()
    for cell in CELLS:
        if time.perf_counter() - started > args.budget_s:
            break
        results.append(measure(Bench(cell, heads, device), limits))
        say(f"{time.perf_counter() - started:5.0f} s  {json.dumps(results[-1])}")
        torch.cuda.empty_cache()
    document = {
        "heads": args.heads,
        "dtype": args.dtype,
        "copy_bytes_per_s": round(limits[0]),
        "product_operations_per_s": round(limits[1]),
        "layer": results,
        "provenance": provenance.collect(device=torch.cuda.get_device_name(), commit=args.commit),
    }
    print(json.dumps(document["layer"]))
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
