"""What a target made of samples, kept on the device: it reads each of them once.

A head learns from the same samples several times, and a target says the same each time. Its pass is
a large part of a training step, so where memory is enough it is made before the first step, and
steps join what was kept.

Legend: N tokens and M rows with a label of all samples that are kept, T and R those of a
micro-batch, F tapped features, D hidden size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.errors import CapacityError
from fledge.ops.micro_batch import TargetRows
from fledge.store.capacity import format_bytes

_GREEDY_AND_MASS_BYTES = 8
_STEPS_SHARE = 0.1
"""Of the device's memory, what steps take that have not begun: gradients and activations."""


class KeptSizes(NamedTuple):
    """How much is kept, one number per sample."""

    numbers: NDArray[np.int64]
    """Of the samples in the corpus, ascending."""

    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def num_bytes(self, *, num_taps: int, hidden_size: int, itemsize: int) -> int:
        row_bytes = hidden_size * itemsize
        label_bytes = row_bytes + _GREEDY_AND_MASS_BYTES
        return int(self.lengths.sum()) * num_taps * row_bytes + int(self.labels.sum()) * label_bytes


class KeptReadings:
    """Memory for readings of samples in the order of the corpus."""

    def __init__(
        self,
        sizes: KeptSizes,
        *,
        num_taps: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        needed = sizes.num_bytes(
            num_taps=num_taps, hidden_size=hidden_size, itemsize=dtype.itemsize
        )
        _require_memory(needed, device)
        self._numbers = sizes.numbers
        self._tokens = np.concatenate([[0], np.cumsum(sizes.lengths)])
        self._labels = np.concatenate([[0], np.cumsum(sizes.labels)])
        num_tokens, num_labels = int(self._tokens[-1]), int(self._labels[-1])
        width = num_taps * hidden_size
        self._features_NF = torch.empty((num_tokens, width), dtype=dtype, device=device)
        self._final_MD = torch.empty((num_labels, hidden_size), dtype=dtype, device=device)
        self._greedy_M = torch.empty(num_labels, dtype=torch.int32, device=device)
        self._log_mass_M = torch.empty(num_labels, dtype=torch.float32, device=device)

    def add(self, numbers: Sequence[int], features_TF: Tensor, targets: TargetRows) -> None:
        """Keep a reading of samples that follow one another."""
        places = self._places(numbers)
        tokens = slice(int(self._tokens[places[0]]), int(self._tokens[places[-1] + 1]))
        labels = slice(int(self._labels[places[0]]), int(self._labels[places[-1] + 1]))
        assert targets.final_RD is not None, "a live target gives final rows"
        self._features_NF[tokens] = features_TF
        self._final_MD[labels] = targets.final_RD
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
            final_RD=torch.cat([self._final_MD[span] for span in labels]),
        )
        return torch.cat([self._features_NF[span] for span in tokens]), targets

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


def _spans(offsets: NDArray[np.int64], places: NDArray[np.int64]) -> list[slice]:
    starts, stops = offsets[places].tolist(), offsets[places + 1].tolist()
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _require_memory(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left_to_steps = int(_STEPS_SHARE * total)
    if needed > free - left_to_steps:
        raise CapacityError(
            f"train.keep_readings would keep {format_bytes(needed)} on {device}, which has "
            f"{format_bytes(free)} free and needs {format_bytes(left_to_steps)} of them for steps; "
            "set it to false, or train on less with train.share."
        )
