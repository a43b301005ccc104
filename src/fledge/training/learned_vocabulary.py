"""A draft vocabulary of what is learned, each source as often as it is learned."""

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.train_settings import TrainSettings
from fledge.models.target_facts import TargetFacts
from fledge.store.corpus import Samples
from fledge.store.vocab_map import VocabMap, choose_vocabulary
from fledge.training.order import divide, from_sources
from fledge.training.sources import SampleTable


def learned_vocabulary(
    corpus: Samples, samples: SampleTable, facts: TargetFacts, settings: TrainSettings
) -> tuple[VocabMap, float]:
    """The vocabulary, and its share of what the target said in it."""
    trained = divide(samples.row_hashes, settings.held_out.share).trained
    positions = from_sources(trained, samples.source_names, settings.sources)
    times = np.bincount(samples.numbers[positions], minlength=len(corpus))
    counts = np.zeros(facts.vocab_size, np.int64)
    first = 0
    for shard in corpus.shards:
        own, first = times[first : first + len(shard)], first + len(shard)
        counts += _count(shard.token_ids, shard.loss_mask, np.diff(shard.offsets), own, len(counts))
    size = min(settings.head.draft_vocab_size, facts.vocab_size)
    found = choose_vocabulary(counts, size, facts.eos_token_ids)
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
