"""Whether a network runs on the native kernels: asked once, tried once, and said where it does not.

Where `FLEDGE_KERNELS=native` asks for them, what cannot be had is an error.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from fledge.contracts.errors import ConfigError
from fledge.models.native_decoder import DecoderParts, NativeDecoder
from fledge.ops.kernel_choice import is_native_asked_for, uses_native
from fledge.ops.kv import KVGroups, KVMemory
from fledge.ops.native_library import NativeLibrary, NoNativeKernelsError, native_library
from fledge.ops.native_product import check_products
from fledge.ops.native_walk import check_walks
from fledge.ops.norms import is_close
from fledge.ops.paged import BlockTables, Pass, make_tree_pass

Forward = Callable[[Pass, KVMemory, Tensor | None, Sequence[int]], tuple[Tensor, list[Tensor]]]
NativeForward = Callable[
    [NativeDecoder, Pass, KVMemory, Tensor | None, Sequence[int]],
    tuple[Tensor, list[Tensor]] | None,
]

_PROBE_TOKENS = 7
_BLOCK = 4
_MOST_DIFFERENCE = 1e-3
_log = logging.getLogger(__name__)


def find_native(weight: Tensor, num_bytes: int) -> NativeLibrary | None:
    """The library for a network of so many bytes; None where it runs without, said once."""
    return _checked_library() if uses_native(weight, num_bytes) else None


def native_problem() -> str | None:
    """Why this machine has no native kernels; None where it has. Compiles them if need be."""
    try:
        library = native_library()
    except NoNativeKernelsError as error:
        return str(error)
    is_right = check_products(library) and check_walks(library)
    return None if is_right else "the compiled kernels are wrong on this machine"


@cache
def _checked_library() -> NativeLibrary | None:
    problem = native_problem()
    if problem is None:
        return native_library()
    _give_up(problem)
    return None


def _give_up(why: str) -> None:
    if is_native_asked_for():
        raise ConfigError(
            f"FLEDGE_KERNELS is 'native', but {why}. Leave it unset to run on plain operations."
        )
    _log.warning("native kernels are not used: %s; passes on this CPU are slower", why)


def make_native(
    library: NativeLibrary, parts: DecoderParts, run_native: NativeForward, run_plain: Forward
) -> NativeDecoder | None:
    """The layers on native kernels, once they agree with the plain ones on a short pass."""
    try:
        native = NativeDecoder(library, parts)
    except NoNativeKernelsError as error:
        _log.info("plain operations run this target: %s", error)
        return None
    packed, slots = _probe_pass(native)
    with torch.no_grad():
        wanted, _ = run_plain(packed, KVGroups(slots), None, ())
        found = run_native(native, packed, KVGroups(slots), None, ())
    if found is None or not is_close(found[0], wanted, _MOST_DIFFERENCE):
        _give_up("they compute something else than the plain operations on this machine")
        return None
    return native


def _probe_pass(native: NativeDecoder) -> tuple[Pass, dict[int | None, int]]:
    num_blocks = -(-_PROBE_TOKENS // _BLOCK)
    table_BP = torch.arange(num_blocks)[None]
    packed = make_tree_pass(
        chain_tokens_C=torch.arange(3, 3 + _PROBE_TOKENS),
        chain_B=torch.tensor([_PROBE_TOKENS]),
        context_B=torch.tensor([0]),
        trees=None,
        num_rows=_PROBE_TOKENS,
        tables=BlockTables(_BLOCK, dict.fromkeys(native.windows, table_BP)),
        num_short=1,
    )
    return packed, dict.fromkeys(native.windows, num_blocks * _BLOCK)
