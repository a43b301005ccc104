"""Packing: every token once, no sequence too long, samples whole where they fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.contracts.errors import ConfigError
from fledge.store.packing import Piece, pack


def test_best_fit_with_the_longest_first() -> None:
    plan = pack([3, 7, 2, 8, 1], 10)
    assert list(plan) == [
        [Piece(2, 0, 2), Piece(3, 0, 8)],
        [Piece(0, 0, 3), Piece(1, 0, 7)],
        [Piece(4, 0, 1)],
    ]
    assert plan.num_tokens == 21
    assert plan.fill == 0.7


def test_only_what_is_too_long_is_split() -> None:
    plan = pack([25, 4], 10)
    assert sorted(piece for sequence in plan for piece in sequence) == [
        Piece(0, 0, 10),
        Piece(0, 10, 20),
        Piece(0, 20, 25),
        Piece(1, 0, 4),
    ]
    assert len(plan) == 3


def test_nothing_to_pack() -> None:
    plan = pack([], 10)
    assert (len(plan), plan.fill, list(plan)) == (0, 0.0, [])
    with pytest.raises(IndexError):
        plan[0]
    with pytest.raises(ConfigError, match="sequences of 0 tokens cannot hold anything"):
        pack([1], 0)


@given(lengths=st.lists(st.integers(1, 40), max_size=60), length=st.integers(1, 24))
def test_every_token_is_in_one_sequence(lengths: list[int], length: int) -> None:
    plan = pack(lengths, length)
    pieces = [piece for sequence in plan for piece in sequence]
    assert all(sum(p.stop - p.start for p in sequence) <= length for sequence in plan)
    covered = [(p.sample, token) for p in pieces for token in range(p.start, p.stop)]
    wanted = [(sample, token) for sample, size in enumerate(lengths) for token in range(size)]
    assert sorted(covered) == wanted
    whole = [sample for sample, size in enumerate(lengths) if size <= length]
    assert all(sum(p.sample == sample for p in pieces) == 1 for sample in whole)
    # Two sequences that would fit into one were not left apart.
    rooms = sorted(sum(p.stop - p.start for p in sequence) for sequence in plan)
    assert len(rooms) < 2 or rooms[0] + rooms[1] > length
