"""A draft vocabulary of what is learned, each source as often as it is learned."""

import numpy as np
from numpy.typing import NDArray

from fledge.models.target_facts import TargetFacts
from fledge.store.corpus import Samples
from fledge.store.vocab_map import VocabMap, choose_vocabulary
from fledge.training.sources import SampleTable


def learned_vocabulary(
    corpus: Samples,
    samples: SampleTable,
    learned: NDArray[np.int64],
    facts: TargetFacts,
    size: int,
) -> tuple[VocabMap, float]:
    """The vocabulary, and its share of what the target said in what is learned.

    `learned` are positions of samples, those that are learned three times in it three times.
    """
    times = np.bincount(samples.numbers[learned], minlength=len(corpus))
    counts = np.zeros(facts.vocab_size, np.int64)
    first = 0
    for shard in corpus.shards:
        own, first = times[first : first + len(shard)], first + len(shard)
        counts += _count(shard.token_ids, shard.loss_mask, np.diff(shard.offsets), own, len(counts))
    found = choose_vocabulary(counts, min(size, facts.vocab_size), facts.eos_token_ids)
    return found, found.coverage(counts)


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
