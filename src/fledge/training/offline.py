"""Training from features: nothing but what capture left behind is read.

Stored rows are joined in threads, copied as they are and decoded on the device, so that as little
as possible crosses the bus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.features.feature_store import FeatureStore
from fledge.features.host_batch import BatchDecoder, HostBatch, load_batch
from fledge.features.target_rows import describe_rows
from fledge.models.target_reading import Readout
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.training.sources import Said, SampleTable, padded


@dataclass(frozen=True, slots=True)
class TemperedShare:
    """The share of the draft vocabulary at another temperature than the one it was stored at."""

    readout: Readout
    draft_ids_V: Tensor
    temperature: float

    @torch.no_grad()
    def applied_to(self, targets: TargetRows) -> TargetRows:
        final_RD = targets.final_RD
        assert final_RD is not None, "tops of distributions are refused"
        described = describe_rows(
            final_RD.to(self.readout.weight_VD.dtype),
            torch.arange(len(final_RD), device=final_RD.device),
            self.readout,
            self.draft_ids_V,
            temperature=self.temperature,
        )
        return replace(targets, log_mass_R=described.log_mass_R)


class OfflineSource:
    """Samples of a directory of features."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        device: torch.device,
        dtype: torch.dtype,
        padded_to: int | None = None,
        tempered: TemperedShare | None = None,
    ) -> None:
        """Rows are decoded to `dtype`, and batches filled up to `padded_to` tokens.

        `tempered` makes the draft vocabulary's share that at a temperature other than 1.
        """
        self.device = device
        self._tempered = tempered
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
        batch = self._decoder.decode(host)
        if self._tempered is not None:
            batch = replace(batch, targets=self._tempered.applied_to(batch.targets))
        return padded(batch, self._padded_to)


def list_features(store: FeatureStore) -> SampleTable:
    """The samples of a directory of features, in the order of the corpus."""
    places = _in_corpus_order(store)
    return SampleTable(store.numbers[places], store.lengths[places], store.row_hashes[places])


def _in_corpus_order(store: FeatureStore) -> NDArray[np.int64]:
    """Positions mean the same as online, whatever order capture wrote in."""
    return np.argsort(store.numbers, kind="stable")
