"""Which samples make which micro-batch, and which are never trained on."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError
from fledge.training.order import (
    TrainingOrder,
    choose,
    divide,
    from_sources,
    pack_in_order,
    some_of,
)

HASHES = np.random.default_rng(0).integers(0, 2**64, 400, dtype=np.uint64)


def lengths(count: int, *, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(10, 512, count)


def order(count: int = 300, **changes: int) -> TrainingOrder:
    settings = {"seed": 1, "epochs": 2, "micro_tokens": 1024, "batch_tokens": 4096, **changes}
    return TrainingOrder(np.arange(count) * 3, lengths(count), **settings)


def steps(made: TrainingOrder) -> list[list[tuple[int, ...]]]:
    return [made.micro_batches(step) for step in range(made.num_steps)]


def test_every_sample_comes_once_in_each_epoch() -> None:
    made = order()
    seen = [sample for step in steps(made) for batch in step for sample in batch]
    assert Counter(seen) == dict.fromkeys(range(0, 900, 3), 2)
    assert sorted(seen[: len(seen) // 2]) != seen[: len(seen) // 2]
    assert made.num_tokens == 2 * lengths(300).sum()


def test_micro_batches_hold_what_they_may_and_are_nearly_full() -> None:
    sizes = lengths(3000)
    made = TrainingOrder(
        np.arange(3000), sizes, seed=0, epochs=1, micro_tokens=1024, batch_tokens=2048
    )
    filled = [sizes[list(batch)].sum() for step in steps(made) for batch in step]
    assert max(filled) <= 1024
    assert np.mean(filled) > 0.95 * 1024
    assert [sum(sizes[list(batch)].sum() for batch in step) for step in steps(made)] == [
        made.tokens(step) for step in range(made.num_steps)
    ]
    assert all(len(step) == 2 for step in steps(made)[:-1])


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert steps(order()) == steps(order())
    assert steps(order()) != steps(order(seed=2))
    whole, first = order(epochs=2), order(epochs=1)
    num_same = first.num_steps - 1  # the last step of one epoch goes on with the next
    assert steps(whole)[:num_same] == steps(first)[:num_same]
    assert steps(whole)[num_same + 1 :][:2] != steps(first)[:2]


def test_a_run_may_end_before_its_epochs() -> None:
    made = order(epochs=50, max_steps=7)
    assert made.num_steps == 7
    assert steps(made) == steps(order(epochs=50))[:7]


def test_one_sample_is_one_step() -> None:
    made = TrainingOrder(
        np.array([5]), np.array([20]), seed=0, epochs=1, micro_tokens=64, batch_tokens=64
    )
    assert steps(made) == [[(5,)]]


def test_conversations_are_held_out_as_a_whole() -> None:
    # Three samples of each conversation.
    division = divide(np.repeat(HASHES, 3), 0.1)
    held_out = set(division.held_out // 3)
    assert not held_out & set(division.trained // 3)
    assert 20 < len(held_out) < 60
    assert len(division.held_out) == 3 * len(held_out)


def test_what_is_held_out_depends_on_ids_alone() -> None:
    few, many = divide(HASHES[:100], 0.1), divide(HASHES, 0.1)
    assert set(few.held_out) == {place for place in many.held_out if place < 100}
    assert set(many.held_out) <= set(divide(HASHES, 0.2).held_out)


def test_at_least_one_conversation_is_held_out_unless_none_is_asked_for() -> None:
    few = np.array([2**63, 2**62, 2**62], np.uint64)
    assert divide(few, 0.001).held_out.tolist() == [1, 2]
    assert divide(few, 0.0).held_out.tolist() == []
    assert divide(few, 0.0).trained.tolist() == [0, 1, 2]


def test_holding_out_everything_is_refused() -> None:
    alone = np.array([7, 7], np.uint64)
    with pytest.raises(ConfigError, match=r"share is 0.02, and all of the 2 samples .*share=0"):
        divide(alone, 0.02)


def test_chosen_samples_are_always_the_same() -> None:
    positions = np.arange(1000, 1400)
    chosen = choose(positions, 50, seed=3)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 50
    assert set(chosen.tolist()) <= set(positions.tolist())
    assert np.array_equal(chosen, choose(positions, 50, seed=3))
    assert np.array_equal(choose(positions, 1000, seed=3), positions)


def test_samples_for_measuring_are_packed_tightly() -> None:
    sizes = lengths(200)
    packed = pack_in_order(sizes, 1024)
    assert sorted(np.concatenate(packed).tolist()) == list(range(200))
    assert max(sizes[members].sum() for members in packed) <= 1024
    assert len(packed) <= 1.05 * sizes.sum() / 1024 + 1


def test_samples_of_some_sources() -> None:
    names = np.array(["chat", "code", "chat", "math"])
    positions = np.array([0, 1, 3])
    assert from_sources(positions, names, ()) is positions
    assert from_sources(positions, names, ("chat", "math")).tolist() == [0, 3]
    with pytest.raises(ConfigError, match="names 'maths', and the corpus has samples of chat, co"):
        from_sources(positions, names, ("maths",))
    repeated = from_sources(positions, names, ("math*3", "chat")).tolist()
    assert sorted(set(repeated)) == [0, 3]
    assert len(repeated) == 4
    for word in ("chat*", "chat*0", "chat*1.5"):
        with pytest.raises(ConfigError, match=r"a whole number from 1 on, as in 'chat\*3'"):
            from_sources(positions, names, (word,))
    with pytest.raises(ConfigError, match="features do not know the sources of their samples"):
        from_sources(positions, None, ("chat",))


def test_a_share_is_of_conversations_and_part_of_every_larger_share() -> None:
    trained = divide(np.repeat(HASHES, 3), 0.1).trained
    hashes = np.repeat(HASHES, 3)
    quarter, half = some_of(trained, hashes, 0.25), some_of(trained, hashes, 0.5)
    assert set(quarter) < set(half) < set(trained)
    assert 0.4 < len(half) / len(trained) < 0.6
    assert not set(half // 3) & (set(trained // 3) - set(half // 3))
    assert some_of(trained, hashes, 1.0) is trained
    assert len(some_of(trained[:3], hashes, 1e-6)) >= 1
