"""How much of each sample of a corpus training needs, counted without reading any token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.features.label_rows import FIRST_LABEL
from fledge.store.corpus import Samples


@dataclass(frozen=True, slots=True)
class SampleRows:
    """One number for each sample of a corpus."""

    kept: NDArray[np.int64]
    """Tokens up to the last label; 0 where a sample teaches nothing."""

    labels: NDArray[np.int64]
    """Rows with a label."""

    @property
    def used(self) -> NDArray[np.int64]:
        """Numbers of the samples that teach something."""
        return np.flatnonzero(self.kept)

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return int(self.kept.sum())

    @property
    def num_features(self) -> int:
        """Rows with features."""
        return int(self.kept.sum()) - 2 * len(self.used)

    @property
    def num_labels(self) -> int:
        return int(self.labels.sum())


def count_rows(corpus: Samples) -> SampleRows:
    """Count the rows of every sample."""
    counted = [_count(shard.offsets, shard.loss_mask) for shard in corpus.shards]
    if not counted:
        return SampleRows(np.empty(0, np.int64), np.empty(0, np.int64))
    kept, labels = zip(*counted, strict=True)
    return SampleRows(np.concatenate(kept), np.concatenate(labels))


def _count(
    offsets: NDArray[Any], loss_mask: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kept tokens and label rows of the samples of one shard."""
    starts, stops = np.asarray(offsets[:-1]), np.asarray(offsets[1:])
    said = np.flatnonzero(loss_mask)
    first = np.searchsorted(said, np.minimum(starts + FIRST_LABEL, stops))
    behind = np.searchsorted(said, stops)
    labels = behind - first
    last = np.zeros(len(starts), np.int64)
    last[labels > 0] = said[behind[labels > 0] - 1]
    return np.where(labels > 0, last + 1 - starts, 0), labels
