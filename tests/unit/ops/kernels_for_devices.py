"""Compiles the engine's kernels for real devices, without one; prints one line for each.

The interpreter accepts more than the compiler does, and knows nothing of a processor's memory. Run
by a test in a process of its own, since the interpreter is chosen once for a process.
"""

import json
import sys
from collections.abc import Mapping

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fledge.ops import (
    accept_triton,
    draft_level_triton,
    experts_triton,
    feature_codec_triton,
    gated_triton,
    head_input_triton,
    kv_triton,
    noised_top_triton,
    norms_triton,
    paged_attention_triton,
    paged_join_triton,
    rope_write_triton,
    top_logprobs_triton,
)

HOPPER, GRAPHICS = 90, 89
OPTIONS = ("num_warps", "num_stages", "maxnreg")
LARGE = {"M": 128, "N": 32, "num_warps": 8, "num_stages": 3}
SMALL = {"M": 16, "N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 128}
HALVES = {"M": 64, "N": 32, "num_warps": 4, "num_stages": 2}


WIDE = ("table", "starts", "num_rows", "chain", "first", "context", "position", "slots", "from")
WIDE += ("to", "addresses", "widths", "rows", "parents", "sizes", "seed", "choices", "drafts")
WIDE += ("tokens", "nodes", "lengths", "failed", "indices")
WIDE += ("top_k", "to_target", "above_nodes", "front_tokens", "front_rows", "front_nodes")
TYPES = {
    **{f"{name}_ptr": "*i64" for name in WIDE},
    **{f"{name}_ptr": "*fp32" for name in ("max", "sum", "parts", "logprobs", "values")},
    **{f"{name}_ptr": "*fp64" for name in ("scores", "temperature", "top_p", "min_p")},
    **{"positions_ptr": "*i64", "columns_ptr": "*i32", "seen_ptr": "*u8", "greedy_ptr": "*u8"},
    **dict.fromkeys(("scale", "soft_cap", "factor", "root_of_block"), "fp32"),
    **{f"{name}_ptr": "*fp32" for name in ("center", "inverse", "hadamard", "thresholds")},
    **{"codes_ptr": "*u8", "scales_ptr": "*fp16"},
    **{f"{name}_ptr": "*u8" for name in ("sampled", "above_seen", "front_seen")},
    **{f"{name}_ptr": "*fp32" for name in ("knots", "lines", "above_scores", "front_scores")},
    **{
        "ends_ptr": "*i32",
        "counts_ptr": "*i32",
        **dict.fromkeys(("eps", "after_eps", "before_eps"), "fp32"),
    },
}


def types_of(kernel: object, constants: Mapping[str, object], element: str) -> dict[str, str]:
    """Types of the arguments by their names; memory of the model's precision is `element`."""
    found = {}
    # Two names mean something else in other kernels: rows to write, values beside keys.
    of_model = {"first_ptr"} if "FIRST_SIZE" in constants else set()
    of_model |= {"values_ptr"} if "KEY_SIZE" in constants else set()
    for name in kernel.arg_names:  # type: ignore[attr-defined]
        if name in constants:
            found[name] = "constexpr"
        elif name.endswith("_ptr") and (name in of_model or name not in TYPES):
            found[name] = f"*{element}"
        else:
            found[name] = TYPES.get(name, "i32")
    return found


def compiled(
    name: str, kernel: object, constants: dict[str, object], element: str, capability: int
) -> None:
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    types = types_of(kernel, constants, element)
    # As a launch finds them: memory and strides are multiples of 16.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, kind) in enumerate(types.items())
        if kind.startswith("*") or "stride" in argument
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options=options)
    line = {"name": name, "capability": capability, "shared_bytes": made.metadata.shared}
    sys.stdout.write(json.dumps(line) + "\n")


def attention(size: int, **changes: object) -> dict[str, object]:
    block = max(16, 1 << (size - 1).bit_length())
    others = ("HAS_WINDOW", "HAS_SOFT_CAP", "HAS_SINKS", "IS_FRONTIER", "IS_LOCATED", "IS_SPLIT")
    facts = {"HAS_SEEN": True, **dict.fromkeys(others, False), "IS_CHAINED": True}
    facts |= {"IS_PARTED": True, "JOINS": True}
    sizes = {"KEY_SIZE": size, "VALUE_SIZE": size, "KEY_BLOCK": block, "VALUE_BLOCK": block}
    sizes |= {"NUM_GROUPS": 3, "GROUP": 3, "PAGE": 16, "SEGMENT": 256, "REQUESTS": 32}
    return {**sizes, **facts, **changes}


def main() -> None:
    attend = paged_attention_triton._attend_kernel
    everything = {"HAS_WINDOW": True, "HAS_SOFT_CAP": True, "HAS_SINKS": True}
    large = attention(128, **LARGE, IS_LOCATED=True, IS_SPLIT=True)
    compiled("large tiles", attend, large, "bf16", HOPPER)
    compiled("small tiles", attend, attention(64, **SMALL), "bf16", HOPPER)
    frontier = attention(96, **SMALL, **everything, IS_FRONTIER=True, IS_SPLIT=True)
    compiled("a frontier with everything", attend, frontier, "bf16", HOPPER)
    long = attention(128, **SMALL, IS_SPLIT=True, JOINS=False)
    compiled("small tiles over long contexts", attend, long, "bf16", HOPPER)
    parts = {"NUM_GROUPS": 8, "GROUP": 4, "SIZE": 128, "BLOCK": 128, "M": 32, "N": 32, "C": 2}
    parts |= dict.fromkeys(("HAS_WINDOW", "HAS_SINKS", "IS_FRONTIER", "IS_LOCATED"), False)
    parts |= {"SEGMENT": 256, "REQUESTS": 32, "IS_CHAINED": True, "num_warps": 2}
    compiled("join", paged_join_triton._join_kernel, parts, "fp32", HOPPER)
    compiled("half tiles", attend, attention(64, **HALVES, IS_CHAINED=False), "fp16", GRAPHICS)
    sizes = {"FIRST_WIDTH": 384, "FIRST_SIZE": 96, "SECOND_WIDTH": 384, "SECOND_SIZE": 96}
    compiled("write", kv_triton._write_kernel, {**sizes, "COLUMNS": 512}, "bf16", HOPPER)
    moves = {"ELEMENT": tl.int64, "MOVES": 8, "COLUMNS": 512}
    compiled("move", kv_triton._move_kernel, moves, "i64", HOPPER)
    choose = {"PART": 8192, "COLUMNS": 1024, "CAN_SAMPLE": True}
    compiled("choose", accept_triton._choose_kernel, choose, "bf16", HOPPER)
    walk = {"NODES": 64, "PARTS": 16}
    compiled("walk", accept_triton._walk_kernel, walk, "i64", HOPPER)
    compiled("best", top_logprobs_triton._part_kernel, {"PART": 4096}, "bf16", HOPPER)
    together = {"PARTS": 16, "FOUND": 64}
    compiled("best of parts", top_logprobs_triton._row_kernel, together, "fp32", HOPPER)
    noised = {"SCALE": 1.5, "DROPPED": 2.0, "WIDTH": 8, "BLOCK": 32, "num_warps": 1}
    compiled("best under noise", noised_top_triton._noised_kernel, noised, "fp32", HOPPER)
    widths = {"WIDTH": 576, "TAP_BLOCKS": 9, "ROW_BLOCKS": 27, "BLOCK": 64, "BITS": 5}
    coding = {**widths, "HAS_UNITS": True, "AT_ONCE": 64}
    compiled("coding", feature_codec_triton._quantise_kernel, coding, "bf16", HOPPER)
    compile_layers()


def compile_layers() -> None:
    """The pointwise work of a decoder layer, and the products of experts."""
    norm = {"SIZE": 4096, "BLOCK": 4096, "AFTER": 3, "BEFORE": 1}
    norm |= dict.fromkeys(("HAS_STREAM", "IS_CHAINED"), True)
    compiled("norm", norms_triton._norm_kernel, {**norm, "num_warps": 8}, "bf16", HOPPER)
    gate = {"SIZE": 14336, "COLUMNS": 1024, "IS_SILU": False, "IS_CHAINED": True}
    compiled("gate", gated_triton._gate_kernel, gate, "bf16", HOPPER)
    heads = {"HEADS": 9, "KV_HEADS": 3, "SIZE": 96, "HALF": 48, "BLOCK": 64}
    asked = {"AT_ONCE": 16, "KIND": 1, **dict.fromkeys(("HAS_SLOTS", "HAS_VALUES"), True)}
    rotate = {**heads, **asked, "IS_CHAINED": True, "num_warps": 4}
    compiled("rotate", rope_write_triton._rotate_kernel, rotate, "bf16", HOPPER)
    joined = {"SIZE": 2880, "BLOCK": 4096, "KIND": 1, "KEEPS_NORMED": True, "num_warps": 8}
    compiled("inputs of a head", head_input_triton._join_kernel, joined, "bf16", HOPPER)
    level = {"KNOTS": 20, "WIDTH": 5, "ROWS": 5, "BLOCK": 32, "SEEN_BLOCK": 64, "HAS_ABOVE": True}
    compiled("a level", draft_level_triton._level_kernel, level, "fp32", HOPPER)
    first = {**level, "ROWS": 1, "BLOCK": 16, "SEEN_BLOCK": 16, "HAS_ABOVE": False}
    compiled("the first level", draft_level_triton._level_kernel, first, "fp32", HOPPER)
    sizes = {"NUM_EXPERTS": 100, "EXPERTS": 128, "K": 2048}
    for element, size, device in (("bf16", 64, HOPPER), ("fp32", 32, GRAPHICS)):
        blocks = {"BLOCK_M": 64, "BLOCK_N": size, "BLOCK_K": size, "IS_EXACT": element == "fp32"}
        options = {"num_warps": 4, "num_stages": 3}
        grouped = {**sizes, **blocks, **options}
        compiled("experts", experts_triton._grouped_kernel, grouped, element, device)


if __name__ == "__main__":
    sys.exit(main())
