"""Times of the kernels between the products of a layer, in other shapes beside the chosen ones.

    python tools/tune_pointwise_kernels.py --out FILE.json

Sizes are those of an 8B model: 32 query and 8 key heads of 128, rows of 4096, gates of 14336. What
a kernel reads was just written, as in a pass.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure_paged_attention import say, timed_us

from fledge.contracts import provenance
from fledge.ops import gated_triton, norms_triton, rope_write_triton
from fledge.ops.norms import Norm
from fledge.ops.rope_write import HeadLayout, Rotation

NUM_ROWS = (1, 8, 32, 64, 128, 256, 384, 1600)
ROTATIONS = ((1, 1), (4, 1), (8, 2), (16, 4), (4, 2), (16, 2))
LAUNCHES = 50


def rotations(num_rows: int, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    product = torch.randn(num_rows, 48 * 128, **made)
    rotation = Rotation(torch.randn(num_rows, 128, **made))
    keys, values = (torch.zeros(4096, 8, 128, **made) for _ in range(2))
    slots = torch.randperm(4096, device=product.device)[:num_rows]
    layout, chosen = HeadLayout(32, 8, 128), rope_write_triton._heads_at_once

    def run() -> None:
        rope_write_triton.rotate_rows(product, rotation, layout, (keys, values, slots))

    yield timed("rotate", num_rows, {}, run)
    for heads, warps in ROTATIONS:
        rope_write_triton._heads_at_once = lambda *_, found=(heads, warps): found
        yield timed("rotate", num_rows, {"heads": heads, "warps": warps}, run)
    rope_write_triton._heads_at_once = chosen


def norms(num_rows: int, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stream = torch.randn(num_rows, 4096, **made)
    norm, chosen = Norm(torch.randn(4096, **made), 1e-5, "cast_first"), norms_triton.num_warps_for

    def run() -> None:
        norms_triton.add_and_norm(stream, stream, None, norm)

    yield timed("norm", num_rows, {}, run)
    for warps in (4, 8, 16):
        norms_triton.num_warps_for = lambda *_, found=warps: found
        yield timed("norm", num_rows, {"warps": warps}, run)
    norms_triton.num_warps_for = chosen


def gates(num_rows: int, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    both, chosen = torch.randn(num_rows, 2 * 14336, **made), gated_triton._COLUMNS

    def run() -> None:
        gated_triton.gate_rows(both, "silu")

    for columns in (512, 1024, 2048, 4096):
        gated_triton._COLUMNS = columns
        yield timed("gate", num_rows, {"columns": columns}, run)
    gated_triton._COLUMNS = chosen


def timed(
    name: str, num_rows: int, variant: dict[str, int], run: Callable[[], None]
) -> dict[str, Any]:
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    graph.replay()
    us = round(timed_us(graph.replay, 5) / LAUNCHES, 2)
    say(f"  {name} {num_rows} rows {variant or 'as chosen'}: {us} us")
    return {"kernel": name, "rows": num_rows, "variant": variant, "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is not a checkout")
    args = parser.parse_args()
    made = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    found = [
        one
        for num_rows in NUM_ROWS
        for kernels in (rotations, norms, gates)
        for one in kernels(num_rows, made)
    ]
    document = {
        "what": "time of a kernel in a graph of launches of it",
        "kernels": found,
        "provenance": provenance.collect(device=torch.cuda.get_device_name(), commit=args.commit),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
