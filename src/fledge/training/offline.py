"""Training from features: nothing but what capture left behind is read.

Stored rows are joined in threads, copied as they are and decoded on the device, so that as little
as possible crosses the bus.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.features.feature_store import FeatureStore
from fledge.features.host_batch import BatchDecoder, HostBatch, load_batch
from fledge.ops.micro_batch import MicroBatch
from fledge.training.sources import Said, SampleTable, padded


class OfflineSource:
    """Samples of a directory of features."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        device: torch.device,
        dtype: torch.dtype,
        padded_to: int | None = None,
    ) -> None:
        """Rows are decoded to `dtype`, and batches filled up to `padded_to` tokens."""
        self.device = device
        self._padded_to = padded_to
        self._store = store
        self._decoder = BatchDecoder(store, device, dtype)
        self._places = _in_corpus_order(store)
        self.samples = list_features(store)

    def said(self, position: int) -> Said:
        sample = self._store.read(int(self._places[position]))
        return Said(sample.token_ids, sample.loss_mask)

    def load(self, positions: Sequence[int]) -> HostBatch:
        places = [int(self._places[position]) for position in positions]
        return load_batch(self._store, places, is_pinned=self.device.type == "cuda")

    def put(self, host: HostBatch) -> MicroBatch:
        return padded(self._decoder.decode(host), self._padded_to)


def list_features(store: FeatureStore) -> SampleTable:
    """The samples of a directory of features, in the order of the corpus."""
    places = _in_corpus_order(store)
    return SampleTable(store.numbers[places], store.lengths[places], store.row_hashes[places])


def _in_corpus_order(store: FeatureStore) -> NDArray[np.int64]:
    """Positions mean the same as online, whatever order capture wrote in."""
    return np.argsort(store.numbers, kind="stable")
