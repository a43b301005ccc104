"""What a target made of samples, kept on the device: it reads each of them once.

A head learns from the same samples several times, and a target says the same each time. Its pass is
a large part of a training step, so where memory is enough it is made before the first step, and
steps join what was kept.

Legend: M rows with a label of all samples that are kept, T tokens and R such rows of a
micro-batch, F tapped features, D hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.errors import CapacityError
from fledge.contracts.feature_formats import row_bytes
from fledge.ops.feature_codec import Codec, make_codec
from fledge.ops.micro_batch import TargetRows
from fledge.store.capacity import format_bytes
from fledge.store.channels import Channels

_GREEDY_AND_MASS_BYTES = 8
_STEPS_SHARE = 0.1
"""Of the device's memory, what steps take that have not begun: gradients and activations."""


def final_format(kept: FeatureFormat) -> FeatureFormat:
    """In which final rows are kept: rounded further, they would change what is taught."""
    return "exact" if kept == "exact" else "q8"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShape:
    """What one token's reading is, and how it is kept."""

    num_taps: int
    hidden_size: int
    format: FeatureFormat

    def feature_bytes(self, itemsize: int) -> int:
        return row_bytes(
            self.format,
            hidden_size=self.hidden_size,
            num_taps=self.num_taps,
            itemsize=itemsize,
        )

    def label_bytes(self, itemsize: int) -> int:
        final = final_format(self.format)
        row = row_bytes(final, hidden_size=self.hidden_size, num_taps=1, itemsize=itemsize)
        return row + _GREEDY_AND_MASS_BYTES

    def codecs(self, dtype: torch.dtype, channels: Channels | None) -> tuple[Codec, Codec]:
        """Of features and of final rows; `channels` are None where features are kept exactly."""
        features = make_codec(
            self.format,
            hidden_size=self.hidden_size,
            num_taps=self.num_taps,
            dtype=dtype,
            channels=channels,
        )
        final = make_codec(
            final_format(self.format), hidden_size=self.hidden_size, num_taps=1, dtype=dtype
        )
        return features, final


class KeptSizes(NamedTuple):
    """How much is kept, one number per sample."""

    numbers: NDArray[np.int64]
    """Of the samples in the corpus, ascending."""

    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def num_bytes(self, shape: KeptShape, itemsize: int) -> int:
        features = int(self.lengths.sum()) * shape.feature_bytes(itemsize)
        return features + int(self.labels.sum()) * shape.label_bytes(itemsize)


class KeptReadings:
    """Memory for readings of samples in the order of the corpus."""

    def __init__(
        self,
        sizes: KeptSizes,
        shape: KeptShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        channels: Channels | None = None,
    ) -> None:
        """`dtype` is that of what the target says, and of what is found again."""
        _require_memory(sizes.num_bytes(shape, dtype.itemsize), shape.format, device)
        self._dtype = dtype
        self._features, self._final = shape.codecs(dtype, channels)
        self._numbers = sizes.numbers
        self._tokens = np.concatenate([[0], np.cumsum(sizes.lengths)])
        self._labels = np.concatenate([[0], np.cumsum(sizes.labels)])
        num_tokens, num_labels = int(self._tokens[-1]), int(self._labels[-1])
        self._feature_parts = _room(self._features, num_tokens, device)
        self._final_parts = _room(self._final, num_labels, device)
        self._greedy_M = torch.empty(num_labels, dtype=torch.int32, device=device)
        self._log_mass_M = torch.empty(num_labels, dtype=torch.float32, device=device)

    def add(self, numbers: Sequence[int], features_TF: Tensor, targets: TargetRows) -> None:
        """Keep a reading of samples that follow one another."""
        places = self._places(numbers)
        tokens = slice(int(self._tokens[places[0]]), int(self._tokens[places[-1] + 1]))
        labels = slice(int(self._labels[places[0]]), int(self._labels[places[-1] + 1]))
        assert targets.final_RD is not None, "a live target gives final rows"
        _put(self._feature_parts, tokens, self._features.encode(features_TF))
        _put(self._final_parts, labels, self._final.encode(targets.final_RD))
        self._greedy_M[labels] = targets.greedy_R.int()
        self._log_mass_M[labels] = targets.log_mass_R

    def find(self, numbers: Sequence[int], rows_R: Tensor) -> tuple[Tensor, TargetRows]:
        """Features and targets of samples in any order; `rows_R` are those of the micro-batch."""
        places = self._places(numbers)
        # One slice a sample, not one index a row: all rows may be more than 32 bits can count.
        tokens, labels = _spans(self._tokens, places), _spans(self._labels, places)
        targets = TargetRows(
            rows_R=rows_R,
            greedy_R=torch.cat([self._greedy_M[span] for span in labels]).long(),
            log_mass_R=torch.cat([self._log_mass_M[span] for span in labels]),
            final_RD=self._final.decode(_joined(self._final_parts, labels), self._dtype),
        )
        features = self._features.decode(_joined(self._feature_parts, tokens), self._dtype)
        return features, targets

    def _places(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        return np.searchsorted(self._numbers, numbers)


def consecutive(lengths: NDArray[np.int64], micro_tokens: int) -> Iterator[range]:
    """Samples in their order, as many at a time as `micro_tokens` hold; one is never split."""
    start = total = 0
    for place, length in enumerate(lengths.tolist()):
        if place > start and total + length > micro_tokens:
            yield range(start, place)
            start, total = place, 0
        total += length
    if start < len(lengths):
        yield range(start, len(lengths))


def _room(codec: Codec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.empty((num_rows, columns), dtype=dtype, device=device)
        for name, (dtype, columns) in codec.parts.items()
    }


def _put(kept: Mapping[str, Tensor], rows: slice, parts: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        kept[name][rows] = part


def _joined(kept: Mapping[str, Tensor], spans: Sequence[slice]) -> dict[str, Tensor]:
    return {name: torch.cat([part[span] for span in spans]) for name, part in kept.items()}


def _spans(offsets: NDArray[np.int64], places: NDArray[np.int64]) -> list[slice]:
    starts, stops = offsets[places].tolist(), offsets[places + 1].tolist()
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _require_memory(needed: int, kept: FeatureFormat, device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left_to_steps = int(_STEPS_SHARE * total)
    if needed > free - left_to_steps:
        raise CapacityError(
            f"train.keep_readings would keep {format_bytes(needed)} on {device}, which has "
            f"{format_bytes(free)} free and needs {format_bytes(left_to_steps)} of them for steps; "
            f'train.kept_format is "{kept}": choose one of fewer bits, set keep_readings to false, '
            "or train on less with train.share."
        )
