"""Times of paged attention with its work cut in other ways, beside the chosen one.

    python tools/tune_paged_attention.py --seconds 80 --out FILE.json

Every candidate is compared with the plain twin, then timed from a captured graph over so many
layers that keys and values come from memory. The most important regimes come first; what does not
fit into the seconds is left out. Kernels are compiled beforehand by several processes, and other
processes find them in Triton's cache. Keys of a step and segments decide the last bits of sums: all
tiles of a model must have the same.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure_paged_attention import Cell, Heads, device_limits, pass_of, say, timed_us, widened
from torch import Tensor

from fledge.contracts import provenance
from fledge.models.attention import attend_stored
from fledge.ops import paged_attention_triton
from fledge.ops.attention import AttentionSpec
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.paged_shape import PagedShape, _tiles, num_segments, paged_shape

LLAMA_8B, SMOLLM2, QWEN = "32,8,128", "9,3,64", "12,2,128"
CACHE_BYTES, MOST_LAYERS = 200e6, 200
MOST_DIFFERENCE = 1e-2

Variant = dict[str, Any]


def shape_of(tile: int, keys: int, warps: int, stages: int, registers: int | None) -> Variant:
    sizes = {"tile": tile, "keys": keys, "num_warps": warps, "num_stages": stages}
    return {**sizes, "registers": registers}


SMALL = (
    (32, 2, 3, 168),
    (32, 1, 3, None),
    (16, 2, 4, 128),
    (32, 4, 3, 128),
    (32, 4, 3, None),
    (64, 4, 2, 128),
    (64, 8, 3, 128),
)
FEW, LARGE = SMALL[2:5], ((64, 8, 3, None), (64, 4, 2, None), (32, 4, 3, None), (64, 8, 2, None))


@dataclass(frozen=True)
class Regime:
    heads: str
    requests: int
    rows: int
    context: int
    tiles: tuple[int, ...] = ()
    shapes: tuple[tuple[int, int, int, int | None], ...] = ()
    """Keys, warps, stages and registers that are tried with each of the tiles."""

    splits: tuple[int, ...] = ()
    """Ways to split the keys that are tried with the shape in the code."""

    @property
    def shaped(self) -> list[Variant]:
        return [shape_of(tile, *shape) for tile in self.tiles for shape in self.shapes]


REGIMES = [
    Regime(LLAMA_8B, 64, 1, 200, (16,), SMALL),
    Regime(LLAMA_8B, 64, 6, 350, (32,), SMALL),
    Regime(LLAMA_8B, 128, 1, 200, (16,), SMALL),
    Regime(LLAMA_8B, 8, 6, 350, (32,), SMALL, (1, 2, 4)),
    Regime(LLAMA_8B, 1, 1, 200, (16,), SMALL, (1, 4)),
    Regime(LLAMA_8B, 32, 6, 350, (32,), SMALL),
    Regime(LLAMA_8B, 256, 1, 200, (16,), SMALL),
    Regime(LLAMA_8B, 32, 1, 200, (16,), SMALL),
    Regime(LLAMA_8B, 1, 1, 8192, (16,), SMALL, (8, 16, 32)),
    Regime(LLAMA_8B, 8, 25, 400, (128, 64), LARGE, (1, 2)),
    Regime(LLAMA_8B, 32, 1, 2048, (16,), SMALL),
    Regime(LLAMA_8B, 8, 1, 200, (16,), SMALL, (1, 2, 4)),
    Regime(LLAMA_8B, 1, 6, 350, (32,), SMALL, (1, 4, 8)),
    Regime(LLAMA_8B, 64, 1, 8192, (16,), SMALL),
    Regime(LLAMA_8B, 8, 6, 2048, (32,), SMALL, (1, 4)),
    Regime(LLAMA_8B, 1, 1, 2048, (16,), SMALL, (4, 8, 16)),
    Regime(SMOLLM2, 64, 1, 200, (16,), FEW),
    Regime(SMOLLM2, 64, 6, 350, (32,), FEW),
    Regime(SMOLLM2, 1, 1, 200, (16,), FEW, (1, 4)),
    Regime(SMOLLM2, 1, 6, 350, (32,), FEW, (1, 4, 8)),
    Regime(LLAMA_8B, 64, 25, 400, (128, 64), LARGE),
    Regime(LLAMA_8B, 64, 2, 400),
    Regime(LLAMA_8B, 64, 4, 400),
    Regime(LLAMA_8B, 1, 25, 400, (128, 64), LARGE, (1, 2, 4)),
    Regime(QWEN, 64, 1, 200),
    Regime(QWEN, 64, 6, 350, (64,), LARGE),
    Regime(QWEN, 1, 6, 2048, (64,), LARGE, (4, 8, 16, 32)),
    Regime(LLAMA_8B, 1, 1, 32_768, (16,), SMALL, (16, 32)),
    Regime(SMOLLM2, 256, 1, 200),
    Regime(SMOLLM2, 8, 25, 400, (128, 64), LARGE, (1, 2)),
    Regime(SMOLLM2, 1, 1, 8192, (16,), FEW, (8, 16, 32)),
]


class Bench:
    """A pass, memory of many layers, and queries; contexts fill a part of the tables."""

    def __init__(
        self, regime: Regime, device: torch.device, most_layers: int = MOST_LAYERS
    ) -> None:
        query, key, size = (int(one) for one in regime.heads.split(","))
        heads, dtype = Heads(query, key, size, torch.bfloat16), torch.bfloat16
        self.heads, self.spec = heads, AttentionSpec(size**-0.5)
        made = pass_of(Cell(regime.requests, regime.rows, regime.context), device)
        self.packed = widened(made)
        num_slots = made.tables.by_window[None].numel() * made.tables.block_size
        self.layer_bytes = num_slots * 2 * key * size * dtype.itemsize
        self.num_layers = int(max(1, min(most_layers, CACHE_BYTES // self.layer_bytes + 1)))
        self.pool = KVPool(num_slots)
        every = torch.arange(num_slots, device=device)
        rows = torch.randn(2, num_slots, key, size, device=device).to(dtype)
        for layer in range(self.num_layers):
            self.pool.write(layer, every, rows[0], rows[1])
        self.query = torch.randn(made.num_tokens, query, size, device=device).to(dtype)
        self.wanted: Tensor | None = None

    def attend(self, layer: int) -> Tensor:
        return attend_stored(self.packed, self.pool, layer, self.query, self.spec)

    def error(self) -> float:
        with choose_kernels("triton"):
            ours = self.attend(0).float()
        if self.wanted is None:
            with choose_kernels("plain"):
                self.wanted = self.attend(0).float()
        return float((ours - self.wanted).norm() / self.wanted.norm())

    def us(self) -> float:
        with choose_kernels("triton"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for layer in range(self.num_layers):
                    self.attend(layer)
        graph.replay()
        return timed_us(graph.replay, 5) / self.num_layers


class Chosen:
    """Inside, the kernel has this shape."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def __enter__(self) -> None:
        variant = self._variant

        def changed(rows: Any, **sizes: Any) -> PagedShape:
            shape = paged_shape(rows, **sizes)
            tile = variant.get("tile") or shape.tile
            num_tiles, tiles_each, is_located = _tiles(rows, tile // sizes["group"])
            counted = {"num_tiles": num_tiles, "tiles_each": tiles_each, "is_located": is_located}
            capacity = rows.table_BP.shape[1] * rows.block_size
            counted["num_parts"] = num_segments(capacity, variant.get("segment", shape.segment))
            return replace(shape, **{**counted, **variant})

        paged_attention_triton.paged_shape = changed

    def __exit__(self, *_: object) -> None:
        paged_attention_triton.paged_shape = paged_shape


def variants_of(regime: Regime) -> Iterator[Variant]:
    yield {}
    yield from regime.shaped
    for num_splits in regime.splits:
        for segment in (128, 256, 512):
            yield {"num_splits": num_splits, "segment": segment}


def tune(regime: Regime, bandwidth: float, device: torch.device) -> list[dict[str, Any]]:
    found = []
    bench = Bench(regime, device)
    tokens = regime.requests * (regime.context + regime.rows)
    limit_us = 1e6 * tokens * 2 * bench.heads.key * bench.heads.size * 2 / bandwidth
    say(f"{regime}  limit {limit_us:.1f} us")
    for variant in variants_of(regime):
        with Chosen(variant):
            try:
                error, us = bench.error(), bench.us()
            except Exception as failure:
                say(f"  {variant}: {type(failure).__name__} {str(failure)[:90]}")
                continue
        is_right = error < MOST_DIFFERENCE
        found.append(
            {
                **{name: getattr(regime, name) for name in ("heads", "requests", "rows")},
                "context": regime.context,
                "variant": variant,
                "us": round(us, 2),
                "gb_per_s": round(limit_us * bandwidth / us / 1e9),
                "share_of_limit": round(limit_us / us, 3),
                "relative_difference": float(f"{error:.1e}"),
            }
        )
        shape = " ".join(f"{name}={value}" for name, value in variant.items()) or "as chosen"
        say(f"  {us:8.2f} us {limit_us / us:6.1%} {'' if is_right else f'WRONG {error} '}{shape}")
    return found


def compile_share(share: int, num_shares: int, most: int | None, device: torch.device) -> None:
    """Runs a part of all candidates once, on short contexts."""
    asked = {
        (regime.heads, regime.rows, bool(regime.splits), json.dumps(variant)): (regime, variant)
        for regime in REGIMES
        for variant in [{}, *regime.shaped]
    }
    for regime, variant in list(asked.values())[:most][share::num_shares]:
        bench = Bench(replace(regime, requests=2, context=32), device, most_layers=1)
        num_splits = 2 if regime.splits else 1
        with Chosen({"num_splits": num_splits, **variant}), choose_kernels("triton"):
            try:
                bench.attend(0)
            except Exception as failure:
                say(f"{variant}: {type(failure).__name__}")


def compile_all(num_processes: int, most: int | None) -> None:
    command = [sys.executable, __file__, "--processes", str(num_processes)]
    command += ["--share"] if most is None else ["--most", str(most), "--share"]
    running = [subprocess.Popen([*command, str(share)]) for share in range(num_processes)]
    for one in running:
        one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--most", type=int, help="compile no more than this beforehand")
    parser.add_argument("--share", type=int, help="compile this share only")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    args = parser.parse_args()
    device, started = torch.device("cuda"), time.perf_counter()
    if args.share is not None:
        compile_share(args.share, args.processes, args.most, device)
        return
    if args.most != 0:
        compile_all(args.processes, args.most)
    say(f"compiled after {time.perf_counter() - started:.0f} s")
    bandwidth, _ = device_limits(torch.bfloat16)
    document: dict[str, Any] = {"copy_bytes_per_s": round(bandwidth), "attention": []}
    for regime in REGIMES:
        if time.perf_counter() - started > args.seconds:
            break
        document["attention"] += tune(regime, bandwidth, device)
        say(f"{time.perf_counter() - started:.0f} s")
        torch.cuda.empty_cache()
        if args.out is not None:
            found = {
                **document,
                "provenance": provenance.collect(
                    device=torch.cuda.get_device_name(), commit=args.commit
                ),
            }
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
