"""Compiles the kernels that begin and end a cycle for real devices, without one."""

from fledge.ops import (
    copies_triton,
    embedded_triton,
    root_pass_triton,
    settle_triton,
    tree_pass_triton,
)
from tests.unit.ops.kernels_for_devices import HOPPER, TYPES, compiled


def main() -> None:
    settled = {"NODES": 64, "LEVELS": 16, "FIRST": 4, "HAS_COPIES": True, "IS_CHAINED": True}
    settled |= {"num_warps": 1}
    compiled("what follows", settle_triton._settle_kernel, settled, "i64", HOPPER)
    roots = {"PAGE": 16, "COLUMNS": 1024}
    compiled("newest tokens", root_pass_triton._root_kernel, roots, "i64", HOPPER)
    laid = {**roots, "NODES": 128, "REQUESTS": 256, "DEPTH": 8}
    compiled("trees", tree_pass_triton._tree_kernel, laid, "i64", HOPPER)
    TYPES.update(dict.fromkeys(("keys_ptr", "lens_ptr", "newest_ptr"), "*i64"))
    matched = {"PAGE": 16, "NUMBERS": 1024, "PARTS": 8, "MOST": 16, "KEY_BITS": 32}
    compiled("matches", copies_triton._match_kernel, matched, "i64", HOPPER)
    TYPES.update(dict.fromkeys(("own_tokens_ptr", "chain_tokens_ptr"), "*i64"))
    TYPES["is_copied_ptr"] = "*u8"
    chosen = {"PAGE": 16, "PARTS": 8, "COUNT": 16, "KNOTS": 20, "LEAST": 6, "MOST": 16}
    chosen |= {"SHARE_ALONE": -0.75, "FIRST_MODE": 2, "KEY_BITS": 32, "num_warps": 1}
    compiled("copies", copies_triton._choose_kernel, chosen, "fp32", HOPPER)
    sizes = {"SIZE": 4096, "BLOCK": 4096, "HEAD_SIZE": 128, "HEAD_BLOCK": 128, "KIND": 1}
    TYPES["token_ids_ptr"] = "*i64"
    begin = {**sizes, "num_warps": 8}
    compiled("beginning", embedded_triton._begin_kernel, begin, "bf16", HOPPER)


if __name__ == "__main__":
    main()
