"""A draft vocabulary of what is learned, each source as often as it is learned."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.models.target_facts import TargetFacts
from fledge.store.corpus import Samples
from fledge.store.vocab_map import VocabMap, choose_vocabulary
from fledge.training.sources import SampleTable


class Learned(NamedTuple):
    """A draft vocabulary."""

    vocab_map: VocabMap
    share: float
    """Of what was said, the part that is in it."""

    common: NDArray[np.bool_] | None
    """Which of its tokens are said most often, where some are to be told apart."""

    taught: NDArray[np.bool_] | None
    """Which of its tokens losses see, where not all."""


def learned_vocabulary(
    corpus: Samples,
    samples: SampleTable,
    learned: NDArray[np.int64],
    facts: TargetFacts,
    size: int,
    num_common: int = 0,
    num_taught: int = 0,
) -> Learned:
    """The most frequent tokens of what the target said in what is learned.

    `learned` are positions of samples, those that are learned three times in it three times.
    """
    times = np.bincount(samples.numbers[learned], minlength=len(corpus))
    counts = np.zeros(facts.vocab_size, np.int64)
    first = 0
    for shard in corpus.shards:
        own, first = times[first : first + len(shard)], first + len(shard)
        counts += _count(shard.token_ids, shard.loss_mask, np.diff(shard.offsets), own, len(counts))
    found = choose_vocabulary(counts, min(size, facts.vocab_size), facts.eos_token_ids)

    def flags(count: int) -> NDArray[np.bool_] | None:
        if not 0 < count < len(found):
            return None
        few = choose_vocabulary(counts, count, facts.eos_token_ids)
        return np.isin(found.target_ids, few.target_ids)

    return Learned(found, found.coverage(counts), flags(num_common), flags(num_taught))


def _count(
    token_ids: NDArray[np.integer],
    loss_mask: NDArray[np.integer],
    lengths: NDArray[np.int64],
    times: NDArray[np.int64],
    vocab_size: int,
) -> NDArray[np.int64]:
    """How often each token has loss, samples counted several times."""
    weights = np.repeat(times, lengths) * (loss_mask == 1)
    counted = np.bincount(token_ids, weights=weights, minlength=vocab_size)
    return counted.astype(np.int64)
