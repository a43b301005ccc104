"""Samples of a store joined to one batch: read on the host as they are stored, decoded on a device.

    tokens      a0 a1 a2 a3 | b0 b1 b2       documents end to end
    features    .. .. -- -- | .. -- --       rows of zeros where nothing was kept
    labels      r1 r2 | r1                   end to end, with the rows they belong to

Rows are laid at their tokens before they are decoded, so that each part is one product on the
device; what empty rows decode to is cleared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.features.capture_layout import FINAL, TAPS, final_codec, taps_codec
from fledge.features.feature_store import FeatureStore
from fledge.features.label_rows import label_rows
from fledge.ops.documents import Documents, make_documents
from fledge.ops.feature_codec import Codec
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.store.feature_layout import Part

_ROWS = "rows"
_TORCH_TYPES = {
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
_WIDENED = ("uint16", "uint32")
"""torch can do little with unsigned numbers of more than a byte."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Samples end to end, as they are stored."""

    lengths: tuple[int, ...]
    sample_numbers: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    """The parts of the layout by name, and `rows`: those of the batch that have a label."""

    first_labels: tuple[int, ...] | None = None
    """First row with a label within each sample, its length for none."""


def host_bytes(store: FeatureStore, places: Sequence[int]) -> int:
    """Memory that `load_batch` takes: the batch, and one sample on its way into it."""
    tokens, _, labels = (int(count) for count in store.index.counts[list(places)].sum(axis=0))
    total = 4 * labels
    for part in store.layout.parts.values():
        num_rows = labels if part.counted == "labels" else tokens
        total += num_rows * (part.columns or 1) * _TORCH_TYPES[part.dtype].itemsize
    return total + int(store.index.sizes[list(places)].max(initial=0))


def load_batch(store: FeatureStore, places: Sequence[int], *, is_pinned: bool) -> HostBatch:
    """Read samples by their places in the store, one at a time."""
    lengths = [int(length) for length in store.index.counts[list(places), 0]]
    num_labels = int(store.index.counts[list(places), 2].sum())
    num_rows = {"tokens": sum(lengths), "features": sum(lengths), "labels": num_labels}
    tensors = {
        name: _empty(part, num_rows[part.counted], is_pinned)
        for name, part in store.layout.parts.items()
    }
    tensors[_ROWS] = torch.empty(num_labels, dtype=torch.int32, pin_memory=is_pinned)
    arrays = {name: _as_stored(tensors[name], part) for name, part in store.layout.parts.items()}
    token = label = 0
    first_labels = []
    for place, length in zip(places, lengths, strict=True):
        rows = _lay(arrays, store, place, token, label)
        first_labels.append(int(rows[0]) if len(rows) else length)
        tensors[_ROWS].numpy()[label : label + len(rows)] = token + rows
        token, label = token + length, label + len(rows)
    numbers = tuple(int(number) for number in store.numbers[list(places)])
    return HostBatch(tuple(lengths), numbers, tensors, tuple(first_labels))


def _as_stored(tensor: Tensor, part: Part) -> NDArray[Any]:
    """The tensor's memory: its bytes, or numbers where they are wider than those in the file."""
    if part.dtype in _WIDENED:
        numbers: NDArray[Any] = tensor.numpy()
        return numbers
    flat: NDArray[Any] = tensor.view(torch.uint8).numpy()
    return flat.reshape(len(tensor), part.row_bytes)


def _empty(part: Part, num_rows: int, is_pinned: bool) -> Tensor:
    dtype = _TORCH_TYPES[part.dtype]
    return torch.empty(part.shape(num_rows), dtype=dtype, pin_memory=is_pinned)


def _lay(
    arrays: Mapping[str, NDArray[Any]], store: FeatureStore, place: int, token: int, label: int
) -> NDArray[np.int64]:
    """Read one sample to its place in the batch; returns its rows with a label."""
    counts = store.index.counts_of(place)
    buffers: dict[str, memoryview] = {}
    widened: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for name, part in store.layout.parts.items():
        start = label if part.counted == "labels" else token
        stop = start + getattr(counts, part.counted)
        rows = arrays[name][start:stop]
        if part.dtype in _WIDENED:
            stored = np.empty(rows.shape, part.numpy_dtype)
            widened.append((rows, stored))
            rows = stored.view(np.uint8)
        buffers[name] = rows.reshape(-1).data
        if part.counted == "features":
            arrays[name][stop : start + counts.tokens] = 0
    store.read_into(place, buffers)
    for rows, stored in widened:
        rows[...] = stored
    return label_rows(arrays["loss_mask"][token : token + counts.tokens, 0])


class BatchDecoder:
    """Turns joined samples into what a trainer reads, on one device."""

    def __init__(self, store: FeatureStore, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._is_centered = store.channels is not None
        self._taps = taps_codec(store.layout, store.channels)
        self._final = final_codec(store.layout)

    @torch.no_grad()
    def decode(self, host: HostBatch) -> MicroBatch:
        parts = {
            name: tensor.to(self._device, non_blocking=True)
            for name, tensor in host.tensors.items()
        }
        logprobs = parts.get("top.logprobs")
        top_ids = parts.get("top.ids")
        documents = make_documents(host.lengths, self._device)
        return MicroBatch(
            token_ids_T=parts["token_ids"].long(),
            loss_mask_T=parts["loss_mask"].bool(),
            documents=documents,
            features_TF=self._features(documents, parts),
            targets=TargetRows(
                rows_R=parts[_ROWS].long(),
                greedy_R=parts["greedy"].long(),
                log_mass_R=parts["log_mass"],
                final_RD=None if self._final is None else self._decoded(FINAL, self._final, parts),
                top_ids_RC=None if top_ids is None else top_ids.long(),
                top_logprobs_RC=None if logprobs is None else logprobs.float(),
            ),
            sample_numbers=host.sample_numbers,
            first_labels=host.first_labels,
        )

    def _features(self, documents: Documents, parts: Mapping[str, Tensor]) -> Tensor:
        features_TF = self._decoded(TAPS, self._taps, parts)
        if self._is_centered:
            # The last two tokens of a sample have no features, and nothing decodes to the centers.
            stops_N = torch.tensor(documents.starts[1:]).to(self._device, non_blocking=True)
            features_TF.index_fill_(0, torch.cat([stops_N - 1, stops_N - 2]), 0)
        return features_TF

    def _decoded(self, prefix: str, codec: Codec, parts: Mapping[str, Tensor]) -> Tensor:
        named = {name: parts[f"{prefix}.{name}"] for name in codec.parts}
        return codec.decode(named, self._dtype)
