"""How much memory an engine asks for: what it can use, never more than there is.

Catches: a plan that exceeds the device, one that leaves half of it unused, window layers that get
as much as full ones or too little for all requests, and a probe that misreads an architecture.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import CapacityError
from fledge.engine import memory
from fledge.engine.drafter import NoDrafter
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.memory import (
    allocate_cache,
    make_cache,
    plan_blocks,
    probe_bytes_per_slot,
)
from fledge.models.target import Target
from fledge.ops.kv import KVPool
from fledge.testing import ARCHITECTURES, target_of, tiny_head, tiny_model

CPU = torch.device("cpu")
FLOAT32 = 4


def blocks_for(
    bytes_per_slot: dict[int | None, int],
    *,
    free_bytes: int | None = None,
    max_tokens: int = 1000,
    **options: Any,
) -> dict[int | None, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_free_bytes", lambda device: free_bytes)
        return plan_blocks(
            bytes_per_slot, settings=EngineSettings(**options), max_tokens=max_tokens, device=CPU
        )


def total(blocks: dict[int | None, int], bytes_per_slot: dict[int | None, int], size: int) -> int:
    return sum(count * size * bytes_per_slot[window] for window, count in blocks.items())


WINDOWS = st.dictionaries(
    st.sampled_from([None, 8, 100, 4096]), st.integers(1, 5000), min_size=1, max_size=3
)


@given(
    bytes_per_slot=WINDOWS,
    free_bytes=st.integers(10**4, 10**9),
    max_tokens=st.integers(16, 20_000),
    block_size=st.sampled_from([1, 16, 64]),
    max_requests=st.integers(1, 64),
)
@settings(max_examples=200)
def test_a_plan_fits_the_device_and_uses_it(
    bytes_per_slot: dict[int | None, int],
    free_bytes: int,
    max_tokens: int,
    block_size: int,
    max_requests: int,
) -> None:
    try:
        blocks = blocks_for(
            bytes_per_slot,
            free_bytes=free_bytes,
            max_tokens=max_tokens,
            block_size=block_size,
            max_requests=max_requests,
        )
    except CapacityError:
        assert 3 * block_size * sum(bytes_per_slot.values()) > free_bytes
        return
    assert blocks.keys() == bytes_per_slot.keys()
    assert min(blocks.values()) >= 1
    taken = {window: count + 1 for window, count in blocks.items()}  # a spare one of each kind
    needed = total(taken, bytes_per_slot, block_size)
    assert needed <= free_bytes
    most = max_requests * -(-max_tokens // block_size)
    assert max(blocks.values()) <= most, "more than all requests together could ever hold"
    fullest = max(blocks, key=lambda window: blocks[window])
    if fullest is None and blocks[None] < most:
        # One more block for everybody would not fit; windows grow by less than that.
        assert needed + block_size * sum(bytes_per_slot.values()) > free_bytes


def test_a_roomy_device_gives_every_request_its_whole_context() -> None:
    blocks = blocks_for({None: 100}, free_bytes=10**15, max_tokens=1001, max_requests=3)
    assert blocks == {None: 3 * 63}


def test_windows_get_what_all_requests_hold_at_once_and_some_to_be_reused() -> None:
    tree = TreeSettings(depth=4, width=3, budget=10)
    options: dict[str, Any] = {"max_requests": 8, "max_pass_tokens": 512, "tree": tree}
    blocks = blocks_for({None: 100, 64: 100}, free_bytes=10**15, max_tokens=100_000, **options)
    full, short = blocks[None], blocks[64]
    assert full == 8 * 6250
    # A window and drafts, with two blocks for where they begin and end, and a pass of prompts.
    assert short == 8 * (-(-(64 + 10) // 16) + 2) + 512 // 16 + full // 4


def test_a_window_longer_than_a_request_gets_what_full_attention_gets() -> None:
    assert blocks_for({None: 1, 10**6: 1}, free_bytes=10**12, max_requests=2) == {
        None: 126,
        10**6: 126,
    }


@pytest.mark.parametrize(("cache_tokens", "count"), [(1, 1), (16, 1), (17, 2), (1600, 100)])
def test_tokens_asked_for_are_tokens_given(cache_tokens: int, count: int) -> None:
    """Whatever the device has free: who names a number has thought about it."""
    blocks = blocks_for({None: 10**6, 8: 10**6}, free_bytes=1, cache_tokens=cache_tokens)
    assert blocks[None] == count
    assert blocks[8] <= count


def test_a_device_without_room_is_told_in_numbers() -> None:
    with pytest.raises(CapacityError) as caught:
        blocks_for({None: 1000, 8: 500}, free_bytes=71_000)
    assert str(caught.value) == (
        "cpu has 71.0 kB for cache memory, which takes three blocks of 16 tokens at least, and one "
        "takes 24.0 kB; free some memory, or use a smaller target."
    )
    assert blocks_for({None: 1000, 8: 500}, free_bytes=72_000) == {None: 2, 8: 2}


def test_tokens_that_a_device_cannot_give_are_refused_with_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))

    def plan(cache_tokens: int) -> dict[int | None, int]:
        asked = EngineSettings(cache_tokens=cache_tokens)
        return plan_blocks({None: 1000}, settings=asked, max_tokens=10**6, device=cuda)

    with pytest.raises(CapacityError) as caught:
        plan(2000)
    assert str(caught.value) == (
        "cache_tokens is 2000, which takes 2.0 MB on cuda, and 1.0 MB are free there; lower it to "
        "832 or less, or leave it at 0 for what the device can give."
    )
    assert plan(832) == {None: 52}


@pytest.mark.parametrize(("layers_that_fit", "tokens"), [(0, 75), (3, 909)])
def test_memory_that_cannot_be_had_is_told_before_any_request(
    monkeypatch: pytest.MonkeyPatch, layers_that_fit: int, tokens: int
) -> None:
    target = target_of(tiny_model("llama"))
    cache = make_cache(target, NoDrafter(), EngineSettings(cache_tokens=1600))
    allocate_cache(cache, target)
    held = cache.num_bytes
    assert held == (1600 + 16) * probe_bytes_per_slot(target)[None]
    hold, pool = KVPool.hold, make_cache(target, NoDrafter(), EngineSettings(cache_tokens=1600))

    def fail(self: KVPool, layer: int, *rest: Any) -> Any:
        if layer == layers_that_fit and self.num_slots > 1:
            raise torch.OutOfMemoryError("no room")
        return hold(self, layer, *rest)

    monkeypatch.setattr(KVPool, "hold", fail)
    with pytest.raises(CapacityError) as caught:
        allocate_cache(pool, target)
    assert "cpu ran out of memory for a cache of 1616 tokens" in str(caught.value)
    assert f"lower cache_tokens to {tokens} or less, lower max_requests" in str(caught.value)


def test_one_block_that_holds_a_whole_request_is_enough() -> None:
    """One request at a time, in a block as long as the context."""
    options: dict[str, Any] = {"max_requests": 1, "block_size": 512}
    assert blocks_for({None: 10}, free_bytes=10**9, max_tokens=300, **options) == {None: 1}


@pytest.mark.parametrize(("available", "share"), [(10**10, 4 * 10**9), (None, 10**9)])
def test_a_share_of_what_the_host_has_available(
    monkeypatch: pytest.MonkeyPatch, available: int | None, share: int
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    assert memory._free_bytes(CPU) == share


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {name: target_of(tiny_model(name)) for name in ARCHITECTURES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_probe_reads_windows_and_bytes_off_the_target(
    targets: dict[str, Target], architecture: str
) -> None:
    target = targets[architecture]
    config = target.config
    key_dims = value_dims = config.num_key_value_heads * config.head_dim
    if architecture.startswith("deepseek"):
        key_dims = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        value_dims = config.num_attention_heads * config.v_head_dim
    windows: list[int | None] = [None] * config.num_hidden_layers
    if architecture == "mistral-sliding":
        windows = [8] * config.num_hidden_layers
    elif "hybrid" in architecture:
        windows = [8 if kind == "sliding_attention" else None for kind in config.layer_types]
    expected = {
        window: windows.count(window) * (key_dims + value_dims) * FLOAT32 for window in windows
    }
    assert probe_bytes_per_slot(target) == expected


@pytest.mark.parametrize(
    ("architecture", "head_window", "windows"),
    [
        ("llama", None, {None}),
        ("llama", 6, {None, 6}),
        ("mistral-sliding", None, {8, None}),
        ("gemma3-hybrid", 8, {None, 8}),
        ("gemma3-hybrid", 6, {None, 8, 6}),
    ],
)
def test_memory_planned_is_memory_taken(
    targets: dict[str, Target], architecture: str, head_window: int | None, windows: set[int | None]
) -> None:
    """Target and head, each in the blocks of its kind, once all of them have been written."""
    target = targets[architecture]
    options = EngineSettings(max_requests=2, cache_tokens=320, tree=TreeSettings(depth=2, width=2))
    head = tiny_head(target, sliding_window=head_window)
    engine = Engine(target, head, options)
    planned = dict(probe_bytes_per_slot(target))
    assert engine.stats.cache_bytes == 0, "nothing is taken before it is used"
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    drafter = HeadDrafter(head, target, options)
    head_bytes = (2 * 2 * 8 + target.hidden_size) * FLOAT32
    assert drafter.bytes_per_slot == head_bytes
    planned[head_window] = planned.get(head_window, 0) + head_bytes
    cache = make_cache(target, drafter, options)
    blocks = {window: pool.num_blocks for window, pool in cache._pools.items()}
    assert blocks.keys() == windows
    # One block of each kind is nobody's: places without a request look at it.
    taken = {window: count + 1 for window, count in blocks.items()}
    assert engine.stats.cache_bytes == total(taken, planned, 16)
    assert engine.stats.head_cache_bytes == taken[head_window] * 16 * head_bytes


def test_a_drafter_without_memory_takes_none(targets: dict[str, Target]) -> None:
    cache = make_cache(targets["mistral-sliding"], NoDrafter(), EngineSettings(cache_tokens=99))
    assert set(cache._pools) == {8}
    assert cache.head_memory.num_slots == 0


@pytest.mark.parametrize("head_window", [None, 6, 8])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_target_and_head_together_stay_within_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
    targets: dict[str, Target],
    architecture: str,
    head_window: int | None,
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 500_000)
    target = targets[architecture]
    engine = Engine(target, tiny_head(target, sliding_window=head_window))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert 180_000 < engine.stats.cache_bytes <= 200_000


def test_requests_share_the_memory_of_a_small_device(
    monkeypatch: pytest.MonkeyPatch, targets: dict[str, Target]
) -> None:
    """From what is free to a refusal that names the number of tokens it came to."""
    monkeypatch.setattr(memory, "available_memory", lambda: 120_000)
    engine = Engine(targets["llama"])
    assert engine._cache.capacity == (120_000 * 4 // 10 // (512 * 16) - 1) * 16
    engine.generate([[5] * 60, [6] * 60, [7] * 60], SamplingParams(max_tokens=4))
