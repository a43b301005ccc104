"""Paged memory under random use: whoever reads finds what was computed from its own tokens.

Catches: a block shared by requests whose tokens differ, one that is freed while a window still
needs it or kept when it does not, drafts that become known to others, a copy that leaves a layer or
the head out, head entries that are promised and not there, and blocks or places that leak.
"""

import pytest
import torch

from fledge.engine.blocks import NOT_THERE
from fledge.engine.cache import PagedCache
from fledge.engine.sequence import Sequence
from tests.unit.engine.cache_simulation import (
    Simulation,
    check_cache,
    make_sequence,
    places_of,
)

KINDS: dict[str, tuple[tuple[int | None, ...], int | None, bool]] = {
    "full": ((None,), None, False),
    "window": ((8,), None, False),
    "hybrid": ((None, 8), None, False),
    "full with head": ((None,), None, True),
    "hybrid with head": ((None, 8), None, True),
    "hybrid with window head": ((None, 8), 8, True),
    "full with window head": ((None,), 6, True),
    "window with full head": ((8,), None, True),
}
TOKENS = [i * i % 7 for i in range(48)]


def simulation(kind: str, size: int, *, seed: int = 0, num_tokens: int = 72) -> Simulation:
    windows, head_window, has_head = KINDS[kind]
    return Simulation(
        windows,
        head_window,
        has_head=has_head,
        block_size=size,
        num_tokens=num_tokens,
        seed=seed,
    )


def started(simulated: Simulation, token_ids: list[int]) -> Sequence:
    seq = make_sequence(token_ids)
    simulated.start(seq)
    return seq


def read_to(simulated: Simulation, seq: Sequence, stop: int) -> None:
    """Read tokens up to a number, as a pass and what follows it do."""
    assert simulated.cache.reserve(seq, stop)
    simulated.write_pass(seq, seq.token_ids, seq.kv_len, stop)
    seq.kv_len = stop
    simulated.cache.tidy([seq])
    simulated.cache.free_behind_windows(seq)
    check_cache(simulated.cache, simulated.running)


def end(simulated: Simulation, seq: Sequence, *, keep: bool = True) -> None:
    simulated.running.remove(seq)
    simulated.cache.release(seq, keep=keep)
    check_cache(simulated.cache, simulated.running)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_random_use(kind: str, size: int) -> None:
    simulated = simulation(kind, size, seed=size + len(kind))
    for _ in range(250):
        simulated.step()
    assert simulated.num_reused > 0
    assert simulated.cache.num_evicted > 0
    for seq in list(simulated.running):
        end(simulated, seq)
    assert simulated.cache.usage == 0
    # Whoever takes all the memory leaves no place behind in the prefix tree.
    hungry = make_sequence([9] * 60)
    simulated.cache.start(hungry)
    for pool in simulated.cache._pools.values():
        pool.take(pool.num_available)
    assert list(places_of(simulated.cache)) == []


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_block_goes_when_every_position_in_it_is_behind_the_window(
    size: int, window: int
) -> None:
    simulated = Simulation(
        (None, window), None, has_head=False, block_size=size, num_tokens=60, seed=0
    )
    seq = started(simulated, TOKENS[:40])
    for kv_len in range(1, 40):
        read_to(simulated, seq, kv_len)
        blocks = seq.blocks[window]
        behind = [(place + 1) * size <= kv_len - window for place in range(len(blocks))]
        assert [block == NOT_THERE for block in blocks] == behind
        assert NOT_THERE not in seq.blocks[None]
        simulated.check_content(seq)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 4])
def test_freed_blocks_still_serve_a_prefix_at_any_length(kind: str, size: int) -> None:
    """Nothing was evicted, so a request that branches off anywhere reads only what is new."""
    simulated = simulation(kind, size, num_tokens=1000)
    seq = started(simulated, TOKENS)
    for kv_len in (20, 21, 47):
        read_to(simulated, seq, kv_len)
    end(simulated, seq)
    for length in range(1, 47):
        branch = started(simulated, [*TOKENS[:length], 9])
        assert branch.kv_len == length
        simulated.check_content(branch)
        end(simulated, branch)


def test_the_last_token_is_always_read() -> None:
    """Its logits choose the next one, so a prompt that is kept as a whole is not a whole hit."""
    simulated = simulation("full", 4)
    seq = started(simulated, TOKENS[:9])
    read_to(simulated, seq, 9)
    end(simulated, seq)
    for length in (1, 4, 5, 8, 9):
        again = started(simulated, TOKENS[:length])
        assert again.kv_len == length - 1
        end(simulated, again)


def test_running_requests_read_the_same_blocks() -> None:
    simulated = simulation("hybrid", 4)
    first = started(simulated, TOKENS[:20])
    read_to(simulated, first, 16)
    used = simulated.cache.usage
    second = started(simulated, [*TOKENS[:16], 9, 9])
    assert second.blocks[None][:4] == first.blocks[None][:4]
    assert simulated.cache.usage == used, "sharing takes no memory"
    end(simulated, first)
    simulated.check_content(second)
    read_to(simulated, second, 18)
    end(simulated, second)


@pytest.mark.parametrize("kind", ["full with head", "hybrid with window head"])
def test_a_part_of_a_block_is_copied_and_the_original_stays(kind: str) -> None:
    simulated = simulation(kind, 4)
    original = started(simulated, TOKENS[:12])
    read_to(simulated, original, 8)
    copy = started(simulated, [*TOKENS[:6], 9, 9, 9])
    assert copy.kv_len == 6
    for window, blocks in copy.blocks.items():
        assert blocks[0] == original.blocks[window][0]
        assert blocks[1] != original.blocks[window][1]
    read_to(simulated, copy, 9)
    simulated.check_content(original)
    simulated.check_content(copy)


@pytest.mark.parametrize("num_tokens", [8, 12])
def test_no_copy_where_it_would_evict_its_source(num_tokens: int) -> None:
    """With two blocks, one of them in use and one kept, the copy would be of itself."""
    simulated = simulation("full", 4, num_tokens=num_tokens)
    seq = started(simulated, TOKENS[:3])
    read_to(simulated, seq, 3)
    end(simulated, seq)
    busy = started(simulated, [9, 9])
    read_to(simulated, busy, 2)
    copy = started(simulated, [*TOKENS[:2], 9, 9])
    assert copy.kv_len == (2 if num_tokens == 12 else 0)


@pytest.mark.parametrize("kind", ["full", "hybrid", "window"])
def test_nothing_of_a_failed_request_is_used_again(kind: str) -> None:
    simulated = simulation(kind, 4)
    seq = started(simulated, TOKENS[:7])
    read_to(simulated, seq, 6)
    end(simulated, seq, keep=False)
    assert simulated.cache.num_kept_tokens == 0
    assert list(places_of(simulated.cache)) == []
    again = started(simulated, TOKENS[:7])
    assert again.kv_len == 0


def test_what_others_read_outlives_a_failed_request() -> None:
    simulated = simulation("full", 4)
    failing = started(simulated, TOKENS[:10])
    read_to(simulated, failing, 9)
    other = started(simulated, [*TOKENS[:8], 9])
    end(simulated, failing, keep=False)
    simulated.check_content(other)
    read_to(simulated, other, 9)
    end(simulated, other)
    assert simulated.cache.num_kept_tokens == 12


def test_two_that_read_the_same_at_once_are_known_once() -> None:
    simulated = simulation("hybrid", 4)
    twins = [started(simulated, TOKENS[:14]) for _ in range(2)]
    for stop in (4, 9, 13):
        for twin in twins:
            read_to(simulated, twin, stop)
    for twin in twins:
        end(simulated, twin)
    assert simulated.cache._pools[None].num_kept == 4


def test_a_place_that_memory_pressure_ate_is_taken_by_those_who_still_hold_its_tokens() -> None:
    """A twin's blocks were known and are evicted while the other goes on with its own."""
    simulated = simulation("full with head", 4, num_tokens=40)
    known, twin = (started(simulated, TOKENS[:14]) for _ in range(2))
    read_to(simulated, known, 8)
    read_to(simulated, twin, 8)
    simulated.catch_up(twin, 8)
    end(simulated, known)
    pool = simulated.cache._pools[None]
    assert pool.num_kept == 2
    for block in pool.take(pool.num_available):
        pool.give_back(block)
    assert list(places_of(simulated.cache)) == []
    read_to(simulated, twin, 13)
    end(simulated, twin)
    again = started(simulated, TOKENS[:14])
    assert (again.kv_len, again.head_len) == (13, 8)
    simulated.check_content(again)


@pytest.mark.parametrize(
    ("head_len", "promised"), [(1, 1), (3, 1), (4, 4), (6, 4), (8, 8), (9, 8), (10, 10)]
)
def test_head_entries_are_promised_where_they_are(head_len: int, promised: int) -> None:
    """Two whole blocks of four and a tail of two; a block counts when the head has read all."""
    simulated = simulation("hybrid with head", 4)
    seq = started(simulated, TOKENS[:11])
    read_to(simulated, seq, 10)
    simulated.catch_up(seq, head_len)
    end(simulated, seq)
    again = started(simulated, TOKENS[:11])
    assert (again.kv_len, again.head_len) == (10, promised)


def test_a_block_in_which_the_head_has_skipped_entries_is_not_promised() -> None:
    """The window of six has moved on before the head read again: entries 1 to 4 were never made."""
    simulated = simulation("full with window head", 4)
    seq = started(simulated, TOKENS[:12])
    read_to(simulated, seq, 10)
    simulated.catch_up(seq, 10)
    assert seq.head_first == 5
    end(simulated, seq)
    again = started(simulated, [*TOKENS[:8], 9])
    assert (again.kv_len, again.head_len) == (8, 1)


def test_entries_made_later_in_shared_blocks_are_promised_to_the_next() -> None:
    simulated = simulation("full with head", 4)
    seq = started(simulated, TOKENS[:9])
    read_to(simulated, seq, 8)
    end(simulated, seq)
    second = started(simulated, TOKENS[:9])
    assert (second.kv_len, second.head_len) == (8, 1)
    simulated.catch_up(second, 8)
    end(simulated, second)
    third = started(simulated, TOKENS[:9])
    assert (third.kv_len, third.head_len) == (8, 8)


def test_a_refused_reservation_takes_nothing() -> None:
    """There is room in one kind of attention and not in the other."""
    cache = PagedCache(
        {None: 3, 8: 2},
        block_size=4,
        max_requests=2,
        max_tokens=40,
        device=torch.device("cpu"),
        target_windows=(None, 8),
    )
    seq = make_sequence(TOKENS[:12])
    cache.start(seq)
    assert cache.reserve(seq, 5)
    assert not cache.reserve(seq, 12)
    assert {window: len(blocks) for window, blocks in seq.blocks.items()} == {None: 2, 8: 2}
    cache.check_integrity([seq])
    assert cache.reserve(seq, 8)
    assert cache.reserve(seq, 1), "what is there already is there"
    assert {window: len(blocks) for window, blocks in seq.blocks.items()} == {None: 2, 8: 2}


def test_room_for_many_is_shown_at_once() -> None:
    """Those before the one that there is no room for have theirs, and tables say so."""
    cache = PagedCache(
        {None: 6, 8: 9},
        block_size=4,
        max_requests=3,
        max_tokens=40,
        device=torch.device("cpu"),
        target_windows=(None, 8),
    )
    cache.check_nothing_held()
    sequences = [make_sequence(TOKENS[:length]) for length in (3, 9, 6)]
    for seq in sequences:
        cache.start(seq)
    assert not cache.reserve_behind(sequences, 2)
    held = [{window: len(one) for window, one in seq.blocks.items()} for seq in sequences]
    assert held == [{None: 2, 8: 2}, {None: 3, 8: 3}, {None: 0, 8: 0}]
    cache.check_integrity(sequences)
    cache.release(sequences[0])
    assert cache.reserve_behind(sequences[1:], 2)
    cache.check_integrity(sequences[1:])
    with pytest.raises(AssertionError, match="a block is lost"):
        cache.check_nothing_held()
    for seq in sequences[1:]:
        cache.release(seq)
    cache.check_nothing_held()


def test_room_that_is_not_needed_is_given_back() -> None:
    simulated = simulation("hybrid", 4)
    seq = started(simulated, TOKENS[:10])
    read_to(simulated, seq, 9)
    cache = simulated.cache
    used = cache.usage
    assert cache.reserve(seq, 22)
    assert cache.trim(seq, 10)
    assert cache.usage == used
    check_cache(cache, [seq])
    simulated.check_content(seq)
    assert not cache.trim(seq, 10), "nothing is left to give"
    assert not cache.trim(seq, 12)
    assert [len(blocks) for blocks in seq.blocks.values()] == [3, 3]


def test_without_sharing_nothing_is_kept() -> None:
    cache = PagedCache(
        {None: 8},
        block_size=4,
        max_requests=2,
        max_tokens=40,
        device=torch.device("cpu"),
        shares_prefixes=False,
    )
    for _ in range(2):
        seq = make_sequence(TOKENS[:12])
        cache.start(seq)
        assert seq.kv_len == 0
        assert cache.reserve(seq, 12)
        seq.kv_len = 11
        cache.tidy([seq])
        cache.release(seq)
        assert (cache.num_kept_tokens, cache.usage) == (0, 0)
        check_cache(cache, [])


def test_memory_in_numbers() -> None:
    simulated = simulation("hybrid", 4, num_tokens=40)
    cache = simulated.cache
    assert (cache.usage, cache.num_kept_tokens, cache.num_bytes) == (0, 0, 0)
    seq = started(simulated, TOKENS[:12])
    read_to(simulated, seq, 12)
    assert cache.usage == 0.3, "three of ten blocks in the fuller pool"
    assert cache.num_bytes == 2 * (40 + 4) * 8, "a spare block beside the ten"
    end(simulated, seq)
    assert (cache.usage, cache.num_kept_tokens) == (0, 12)
    cache.reset()
    assert cache.num_kept_tokens == 0
    assert started(simulated, TOKENS[:12]).kv_len == 0


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("windows", [(None,), (5,), (8,), (None, 8)], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 6, 9, 14])
@pytest.mark.parametrize("first_chunk", [1, 2, 99])
def test_alone_a_request_always_goes_on(
    first_chunk: int, num_blocks: int, windows: tuple[int | None, ...], size: int
) -> None:
    """Up to the capacity, however small the memory, in chunks as large as the cache allows."""
    cache = PagedCache(
        dict.fromkeys(windows, num_blocks),
        block_size=size,
        max_requests=1,
        max_tokens=60,
        device=torch.device("cpu"),
        target_windows=windows,
    )
    length = 50 if cache.capacity is None else min(50, cache.capacity)
    seq = make_sequence([1] * length)
    cache.start(seq)
    while seq.num_unread:
        chunk = min(seq.num_unread, cache.max_chunk)
        if seq.kv_len == 0:
            chunk = min(chunk, first_chunk)
        assert cache.reserve(seq, seq.kv_len + chunk)
        seq.kv_len += chunk
        cache.tidy([seq])
        cache.free_behind_windows(seq)
        cache.check_integrity([seq])


def test_capacity_is_that_of_full_attention_or_of_a_window_too_large_for_the_memory() -> None:
    def capacity(num_blocks: dict[int | None, int]) -> int | None:
        return PagedCache(
            num_blocks,
            block_size=4,
            max_requests=1,
            max_tokens=60,
            device=torch.device("cpu"),
            target_windows=num_blocks,
        ).capacity

    assert capacity({None: 5}) == 20
    assert capacity({None: 5, 8: 3}) == 20
    assert capacity({8: 3}) is None, "what a window has left behind makes room for ever"
    assert capacity({8: 2}) == 8
    assert capacity({8: 3, None: 9}) == 36
    assert capacity({8: 2, None: 9}) == 8


def test_integrity_sees_rows_and_tables_that_are_wrong() -> None:
    simulated = simulation("full", 4)
    seq = started(simulated, TOKENS[:9])
    read_to(simulated, seq, 8)
    cache = simulated.cache
    cache.check_integrity([seq])
    with pytest.raises(AssertionError, match="is lost"):
        cache.check_integrity([])
    cache.all_tables.by_window[None][seq.row, 1] = 7
    with pytest.raises(AssertionError, match="table"):
        cache.check_integrity([seq])
    cache.all_tables.by_window[None][seq.row, 1] = seq.blocks[None][1]
    cache.all_tables.by_window[None][seq.row, 2] = 7
    with pytest.raises(AssertionError, match="table"):
        cache.check_integrity([seq])
    cache.all_tables.by_window[None][seq.row, 2] = NOT_THERE
    row = cache._free_rows.pop()
    with pytest.raises(AssertionError, match="a row of the tables is lost"):
        cache.check_integrity([seq])
    cache._free_rows.append(row)
    seq.blocks[None][1] = seq.blocks[None][0]
    with pytest.raises(AssertionError, match="holds a block twice"):
        cache.check_integrity([seq])


def test_the_end_of_a_request_is_evicted_before_its_beginning() -> None:
    """A beginning without its end is still of use."""
    simulated = simulation("full", 4, num_tokens=32)
    seq = started(simulated, TOKENS[:17])
    read_to(simulated, seq, 16)
    end(simulated, seq)
    other = started(simulated, [9] * 25)
    read_to(simulated, other, 24)
    assert simulated.cache.num_evicted == 2
    assert started(simulated, TOKENS[:17]).kv_len == 8
