"""Time of decoder layers with their kernels launched early, against one after another.

    python tools/measure_layer_chain.py --out benchmarks/FILE.json

Layers have the shape of an 8B model and random weights, each its own, so that weights and keys come
from memory. A pass of them is captured as a graph, once with chained launches and once without.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measure_paged_attention import Cell, pass_of, say, timed_us
from torch import Tensor

from fledge.contracts import provenance
from fledge.ops import (
    gated_triton,
    norms_triton,
    paged_attention_triton,
    rope_write_triton,
)
from fledge.ops.attention import AttentionSpec
from fledge.ops.launch_chain_triton import chained
from fledge.ops.norms import Norm
from fledge.ops.rope_write import HeadLayout, Rotation

HIDDEN, HEADS, KV_HEADS, SIZE, GATES = 4096, 32, 8, 128, 14336
NUM_LAYERS = 8
CELLS = [Cell(64, 1, 200), Cell(1, 1, 200), Cell(8, 6, 350), Cell(8, 1, 200), Cell(64, 6, 350)]
USERS = (gated_triton, norms_triton, paged_attention_triton, rope_write_triton)


class Layers:
    """Weights of all layers, and memory for their keys and values."""

    def __init__(self, device: torch.device) -> None:
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        widths = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, 2 * GATES, HIDDEN)
        inputs = (HIDDEN, HIDDEN, HIDDEN, GATES)
        self.weights = [
            [torch.randn(w, i, **made) / i**0.5 for w, i in zip(widths, inputs, strict=True)]
            for _ in range(NUM_LAYERS)
        ]
        self.norm = Norm(torch.ones(HIDDEN, **made), 1e-5, "cast_first")
        self.layout = HeadLayout(HEADS, KV_HEADS, SIZE)

    def run(self, cell: Cell, device: torch.device) -> tuple[float, Tensor]:
        """Microseconds of one layer, and what comes out of the last."""
        # Blocks lie in the same order both times, so that what comes out can be compared.
        torch.manual_seed(0)
        packed = pass_of(cell, device)
        num_slots = packed.tables.by_window[None].numel() * packed.tables.block_size
        generator = torch.Generator(device).manual_seed(0)
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        shape = (NUM_LAYERS, 2, num_slots, KV_HEADS, SIZE)
        pools = torch.randn(shape, generator=generator, **made)
        start_TD = torch.randn(packed.num_tokens, HIDDEN, generator=generator, **made)
        angles = packed.positions_T[:, None] / 10_000 ** torch.linspace(0, 1, 64, device=device)
        rotation = Rotation(torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16))
        rows, slots_T = packed.paged(None), packed.view(None).write_slots_T
        spec = AttentionSpec(SIZE**-0.5)

        def run() -> Tensor:
            fresh, stream = start_TD, torch.zeros_like(start_TD)
            for weights, (keys, values) in zip(self.weights, pools, strict=True):
                stream, normed = norms_triton.add_and_norm(fresh, stream, None, self.norm)
                query = rope_write_triton.rotate_rows(
                    normed @ weights[0].t(), rotation, self.layout, (keys, values, slots_T)
                )
                seen = paged_attention_triton.attend_paged(rows, query, keys, values, spec)
                stream, normed = norms_triton.add_and_norm(
                    seen.flatten(1) @ weights[1].t(), stream, None, self.norm
                )
                gates = gated_triton.gate_rows(normed @ weights[2].t(), "silu")
                fresh = gates @ weights[3].t()
            return stream + fresh

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        graph.replay()
        return timed_us(graph.replay, 9) / NUM_LAYERS, out.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is not a checkout")
    args = parser.parse_args()
    device = torch.device("cuda")
    layers, found = Layers(device), []
    for cell in CELLS:
        timed, outputs = {}, []
        for name in ("chained", "one by one"):
            told = chained(device) if name == "chained" else {"IS_CHAINED": False}
            for user in USERS:
                vars(user)["chained"] = lambda *_, told=told: told
            timed[name], out = layers.run(cell, device)
            outputs.append(out)
        found.append(
            {
                "requests": cell.requests,
                "rows_each": cell.rows,
                "context": cell.context,
                "layer_us": {name: round(us, 2) for name, us in timed.items()},
                "is_same": bool(torch.equal(*outputs)),
            }
        )
        say(json.dumps(found[-1]))
        document = {
            "what": "time of a decoder layer of the shape of an 8B model, launches chained or not",
            "layers": found,
            "provenance": provenance.collect(
                device=torch.cuda.get_device_name(), commit=args.commit
            ),
        }
        if args.out is not None:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
