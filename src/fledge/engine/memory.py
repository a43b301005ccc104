"""How many blocks of cache an engine gets: what its requests can use, what the device can give."""

import torch

from fledge.contracts.errors import CapacityError
from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.drafter import Drafter
from fledge.models.target import Target
from fledge.ops.kv import KVProbe
from fledge.ops.packed import SequencePart, pack
from fledge.store.capacity import available_memory, format_bytes

_DEVICE_SHARE = 0.85
"""Of the free memory of a GPU; the rest is for the activations of a pass."""

_HOST_SHARE = 0.4


def probe_bytes_per_slot(target: Target) -> dict[int | None, int]:
    """What one token costs in the target's cache, by kind of attention: read off a real pass."""
    return _probe(target).bytes_per_slot


def _probe(target: Target) -> KVProbe:
    probe = KVProbe()
    zero = torch.zeros(1, dtype=torch.long, device=target.device)
    target.forward(pack([SequencePart(zero, zero, zero, zero)]), probe)
    return probe


def plan_blocks(
    bytes_per_slot: dict[int | None, int],
    *,
    settings: EngineSettings,
    max_tokens: int,
    device: torch.device,
) -> dict[int | None, int]:
    """Blocks of each kind of attention; `max_tokens` is the longest a request may become."""
    size = settings.block_size
    most = settings.max_requests * -(-max_tokens // size)
    if settings.cache_tokens:
        asked = -(-settings.cache_tokens // size)
        if device.type == "cuda":  # a host gives pages only when they are written to
            _require_room(asked, bytes_per_slot, settings, device)
        return _blocks_for(asked, bytes_per_slot, settings)
    budget = _free_bytes(device)
    low = _most_blocks(most, bytes_per_slot, settings, budget)
    if low < min(2, most):
        raise CapacityError(
            f"{device} has {format_bytes(budget)} for cache memory, which takes three blocks of "
            f"{size} tokens at least, and one takes "
            f"{format_bytes(size * sum(bytes_per_slot.values()))}; free some memory, or use a "
            "smaller target."
        )
    return _blocks_for(low, bytes_per_slot, settings)


def _most_blocks(
    most: int, bytes_per_slot: dict[int | None, int], settings: EngineSettings, budget: int
) -> int:
    """Blocks that a budget of bytes has room for."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _needed_bytes(middle, bytes_per_slot, settings) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _needed_bytes(
    num_blocks: int, bytes_per_slot: dict[int | None, int], settings: EngineSettings
) -> int:
    blocks = _blocks_for(num_blocks, bytes_per_slot, settings)
    # One block of each kind is spare.
    return sum(
        (count + 1) * settings.block_size * bytes_per_slot[window]
        for window, count in blocks.items()
    )


def _require_room(
    asked: int,
    bytes_per_slot: dict[int | None, int],
    settings: EngineSettings,
    device: torch.device,
) -> None:
    """Refuse what a device cannot give, before anything is loaded further."""
    needed = _needed_bytes(asked, bytes_per_slot, settings)
    budget = _free_bytes(device)
    free = int(budget / _DEVICE_SHARE)
    if needed <= free:
        return
    fitting = _most_blocks(asked, bytes_per_slot, settings, budget) * settings.block_size
    raise CapacityError(
        f"cache_tokens is {settings.cache_tokens}, which takes {format_bytes(needed)} on {device}, "
        f"and {format_bytes(free)} are free there; lower it to {fitting} or less, or leave it at 0 "
        "for what the device can give."
    )


def allocate_cache(cache: PagedCache, target: Target) -> None:
    """Take the target's cache memory now, so that what does not fit is told before any request."""
    for window, pool in _probe(target).pools.items():
        for layer in sorted(pool.layer_ids):
            rows = pool.layer(layer)
            try:
                cache.target_memory.for_window(window).hold(
                    layer, rows[0], *(one.shape[1:] for one in rows)
                )
            except torch.OutOfMemoryError as error:
                num_tokens = max(one.num_slots for one in cache.target_memory.pools.values())
                # Of what there was room for, a quarter is left to passes.
                share = 0.75 * max(layer, 0.25) / target.num_layers
                raise CapacityError(
                    f"{target.device} ran out of memory for a cache of {num_tokens} tokens, in "
                    f"layer {layer} of {target.num_layers}; lower cache_tokens to "
                    f"{max(1, int(num_tokens * share))} or less, lower max_requests, or end what "
                    "else uses the device."
                ) from error


def _blocks_for(
    num_blocks: int, bytes_per_slot: dict[int | None, int], settings: EngineSettings
) -> dict[int | None, int]:
    """Window layers get what all requests can hold at once, and a quarter more to be reused."""
    size = settings.block_size
    blocks = {}
    for window in bytes_per_slot:
        count = num_blocks
        if window is not None:
            scratch = settings.tree.num_scratch
            held = settings.max_requests * (-(-(window + scratch) // size) + 2)
            count = min(count, held + -(-settings.max_pass_tokens // size) + num_blocks // 4)
        blocks[window] = count
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    available = available_memory()
    # Where the system does not say, a gigabyte is safe to ask for.
    return int(available * _HOST_SHARE) if available is not None else 10**9


def make_cache(target: Target, drafter: Drafter, settings: EngineSettings) -> PagedCache:
    """Memory for the target and the head, sized by what the device has free."""
    target_bytes = probe_bytes_per_slot(target)
    bytes_per_slot = dict(target_bytes)
    if drafter.bytes_per_slot:
        head_bytes = bytes_per_slot.get(drafter.window, 0) + drafter.bytes_per_slot
        bytes_per_slot[drafter.window] = head_bytes
    max_tokens = target.context_len + drafter.num_scratch
    num_blocks = plan_blocks(
        bytes_per_slot, settings=settings, max_tokens=max_tokens, device=target.device
    )
    cache = PagedCache(
        num_blocks,
        block_size=settings.block_size,
        max_requests=settings.max_requests,
        max_tokens=max_tokens,
        device=target.device,
        head_window=drafter.window,
        target_windows=target_bytes,
        shares_prefixes=settings.share_prefixes,
    )
    if cache.capacity is not None and cache.capacity < 2:
        raise CapacityError(
            f"the cache memory holds {cache.capacity} token, and a prompt with its answer needs "
            f"at least 2; cache_tokens is {settings.cache_tokens}, raise it."
        )
    return cache
