"""Which samples make which micro-batch at which step.

Everything here is a function of the samples' lengths, their rows' ids and the seed. The number of
processes does not enter: they share out the micro-batches of a step among themselves.

    epoch 0: shuffled samples | window | window | ...   each window packed by best fit
    epoch 1: shuffled anew    | ...
    micro-batches             m0 m1 m2 m3 m4 m5 ...     a step takes the next few, across epochs
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError
from fledge.store.packing import pack
from fledge.store.shuffle import shuffled

_WINDOW_MICRO_BATCHES = 64
"""Samples are packed among their neighbours in the shuffled order: enough of them to leave little
room over, few enough to stay shuffled."""

_HASHES = 2.0**64
_MIXING = np.uint64(0x9E3779B97F4A7C15)


class Division(NamedTuple):
    """Positions of samples to learn from, and of those that are only measured on."""

    trained: NDArray[np.int64]
    held_out: NDArray[np.int64]


def divide(row_hashes: NDArray[np.uint64], share: float) -> Division:
    """Hold out whole conversations by the hash of their ids; with a share of 0 none."""
    if share == 0:
        return Division(np.arange(len(row_hashes)), np.empty(0, np.int64))
    limit = np.uint64(min(share * _HASHES, _HASHES - 2048))
    chosen = row_hashes < limit
    if not chosen.any() and len(row_hashes):
        chosen = row_hashes == row_hashes.min()
    if chosen.all():
        raise ConfigError(
            f"train.held_out.share is {share}, and all of the {len(row_hashes)} samples belong to "
            "conversations that would be held out; give more conversations, or hold out none with "
            "--set train.held_out.share=0."
        )
    return Division(np.flatnonzero(~chosen), np.flatnonzero(chosen))


def from_sources(
    positions: NDArray[np.int64], source_names: NDArray[np.str_] | None, wanted: Sequence[str]
) -> NDArray[np.int64]:
    """The positions of some sources, those of `NAME*3` three times; of all where none is named."""
    if not wanted:
        return positions
    if source_names is None:
        raise ConfigError(
            f"train.sources is {list(wanted)}, and features do not know the sources of their "
            "samples; train with --corpus, or name no sources."
        )
    known = sorted(set(source_names.tolist()))
    times = np.zeros(len(positions), np.int64)
    for one in wanted:
        name, count = _source_and_times(one)
        if name not in known:
            raise ConfigError(
                f"train.sources names {name!r}, and the corpus has samples of {', '.join(known)}."
            )
        times[source_names[positions] == name] = count
    return np.repeat(positions, times)


def _source_and_times(word: str) -> tuple[str, int]:
    name, star, count = word.partition("*")
    if star and not (count.isdecimal() and int(count) > 0):
        raise ConfigError(
            f"train.sources has {word!r}; behind a source's name and * stands how often its "
            f"samples are learned in an epoch, a whole number from 1 on, as in '{name}*3'."
        )
    return name, int(count or 1)


def some_of(
    positions: NDArray[np.int64], row_hashes: NDArray[np.uint64], share: float
) -> NDArray[np.int64]:
    """The positions of a share of the conversations; a larger share has those of a smaller one.

    By another hash than what is held out, or the share would be of what that left over.
    """
    if share == 1:
        return positions
    mixed = row_hashes[positions] * _MIXING
    chosen = mixed < np.uint64(share * _HASHES)
    if len(positions) and not chosen.any():
        chosen = mixed == mixed.min()
    return positions[chosen]


def choose(positions: NDArray[np.int64], count: int, *, seed: int) -> NDArray[np.int64]:
    """At most `count` of the positions, in ascending order; always the same ones."""
    order = shuffled(len(positions), seed, -1)
    return np.sort(positions[order[:count]])


class TrainingOrder:
    """The micro-batches of every step of a run."""

    def __init__(
        self,
        positions: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        seed: int,
        epochs: int,
        micro_tokens: int,
        batch_tokens: int,
        max_steps: int = 0,
    ) -> None:
        """`lengths` are those of the positions; none is longer than `micro_tokens`."""
        self._per_step = batch_tokens // micro_tokens
        wanted = max_steps * self._per_step if max_steps else None
        self._micro_batches: list[tuple[int, ...]] = []
        self._tokens: list[int] = []
        for epoch in range(epochs):
            if wanted is not None and len(self._micro_batches) >= wanted:
                break
            for members in _pack_epoch(lengths, seed=seed, epoch=epoch, micro_tokens=micro_tokens):
                self._micro_batches.append(tuple(int(one) for one in positions[members]))
                self._tokens.append(int(lengths[members].sum()))
        if wanted is not None:
            del self._micro_batches[wanted:], self._tokens[wanted:]

    @property
    def num_steps(self) -> int:
        return -(-len(self._micro_batches) // self._per_step)

    @property
    def num_tokens(self) -> int:
        """Of all steps."""
        return sum(self._tokens)

    def micro_batches(self, step: int) -> list[tuple[int, ...]]:
        """Positions of the samples in each micro-batch of a step, counted from 0."""
        return self._micro_batches[step * self._per_step : (step + 1) * self._per_step]

    def tokens(self, step: int) -> int:
        return sum(self._tokens[step * self._per_step : (step + 1) * self._per_step])


def pack_in_order(lengths: NDArray[np.int64], micro_tokens: int) -> list[NDArray[np.int64]]:
    """Samples packed for measuring: indices into `lengths`, as few micro-batches as possible."""
    return list(_packed(np.arange(len(lengths)), lengths, micro_tokens))


def _pack_epoch(
    lengths: NDArray[np.int64], *, seed: int, epoch: int, micro_tokens: int
) -> Iterator[NDArray[np.int64]]:
    order = shuffled(len(lengths), seed, epoch)
    ends = np.cumsum(lengths[order])
    windows = ends // (_WINDOW_MICRO_BATCHES * micro_tokens)
    for start, stop in _runs(windows):
        packed = list(_packed(order[start:stop], lengths, micro_tokens))
        # Packing begins with the longest samples; a step should see all lengths.
        for place in shuffled(len(packed), seed, epoch):
            yield packed[place]


def _packed(
    members: NDArray[np.int64], lengths: NDArray[np.int64], micro_tokens: int
) -> Iterator[NDArray[np.int64]]:
    for pieces in pack(lengths[members], micro_tokens):
        yield members[[piece.sample for piece in pieces]]


def _runs(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where equal neighbours begin and end."""
    borders = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *(int(border) for border in borders), len(values)]
    yield from zip(edges[:-1], edges[1:], strict=True)
