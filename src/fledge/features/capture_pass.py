"""One pass of a capture: the target reads samples, and what is kept of them goes to the host.

Everything is computed and coded on the device. On CUDA the results are copied to pinned memory on a
stream of their own, so that the next pass runs meanwhile; nobody waits before `samples` is called.

Legend: T tokens of the pass, R rows with a label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.errors import ArtifactError, CapacityError
from fledge.features.capture_layout import FINAL, TAPS, final_codec, taps_codec
from fledge.features.label_rows import feature_rows, kept_tokens, label_rows, read_tokens
from fledge.features.target_rows import describe_rows
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import TargetRows
from fledge.store.channels import Channels
from fledge.store.corpus_shard import Sample, token_dtype
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.row_hash import conversation_hash
from fledge.store.vocab_map import VocabMap

_IS_FINITE = "is_finite"


class _Piece(NamedTuple):
    """One sample of a pass."""

    number: int
    sample: Sample
    token_rows: slice
    """Where it lies among the tokens that the target read."""

    label_rows: slice
    """Where its labels lie among those of the pass."""

    @property
    def num_kept(self) -> int:
        return int(self.token_rows.stop - self.token_rows.start) + 1


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass will leave on the host."""

    pieces: tuple[_Piece, ...]
    arrays: dict[str, Tensor]
    copied: torch.cuda.Event | None
    """When the arrays hold their values; None where they do already."""

    @property
    def num_tokens(self) -> int:
        """That the target reads."""
        return int(self.pieces[-1].token_rows.stop)

    def wait(self) -> None:
        """Until the device has done this pass."""
        if self.copied is not None:
            self.copied.synchronize()

    def samples(self) -> list[EncodedSample]:
        """The samples, once they have arrived; refuses any with infinity or NaN."""
        self.wait()
        arrays = {name: _to_numpy(tensor) for name, tensor in self.arrays.items()}
        is_finite_T = arrays.pop(_IS_FINITE)
        for piece in self.pieces:
            _refuse_overflow(piece, is_finite_T)
        return [_cut_out(piece, arrays) for piece in self.pieces]


def _refuse_overflow(piece: _Piece, is_finite_T: NDArray[Any]) -> None:
    if not is_finite_T[piece.token_rows].all():
        raise ArtifactError(
            f"the target's hidden states of sample {piece.number} of the corpus (row "
            f"{piece.sample.row_id}) hold infinity or NaN: it overflowed. Load it in bfloat16 or "
            "float32, or leave the row out."
        )


def _cut_out(piece: _Piece, arrays: dict[str, NDArray[Any]]) -> EncodedSample:
    start, num_kept = piece.token_rows.start, piece.num_kept
    features = slice(start, start + feature_rows(num_kept))
    rows = {
        name: array[features if name.startswith(TAPS) else piece.label_rows]
        for name, array in arrays.items()
    }
    return EncodedSample(
        number=piece.number,
        row_hash=conversation_hash(piece.sample.row_id),
        token_ids=piece.sample.token_ids[:num_kept],
        loss_mask=piece.sample.loss_mask[:num_kept],
        rows=rows,
    )


class PassRunner:
    """Reads samples with one target, as one layout keeps them."""

    def __init__(
        self,
        target: Target,
        layout: FeatureLayout,
        channels: Channels | None,
        vocab_map: VocabMap,
    ) -> None:
        self._target = target
        self._layout = layout
        self._readout = target.readout
        self._taps_codec = taps_codec(layout, channels)
        self._final_codec = final_codec(layout)
        self._draft_ids = torch.from_numpy(vocab_map.target_ids).to(target.device)
        self._copies = _side_stream(target.device)

    @torch.no_grad()
    def start(self, samples: Sequence[tuple[int, Sample]]) -> PassResult:
        """Have the target read whole samples, given with their numbers."""
        pieces = _lay_out(samples)
        lengths = [piece.num_kept - 1 for piece in pieces]
        ids = [piece.sample.token_ids[: piece.num_kept - 1] for piece in pieces]
        rows = [label_rows(piece.sample.loss_mask) + piece.token_rows.start for piece in pieces]
        try:
            arrays = self._read(self._sent(ids), lengths, self._sent(rows))
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self._target.device} ran out of memory over a pass of {sum(lengths)} tokens; "
                "lower capture.pass_tokens, or load in bfloat16."
            ) from error
        return self._to_host(pieces, arrays)

    def _read(
        self, token_ids_T: Tensor, lengths: Sequence[int], rows_R: Tensor
    ) -> dict[str, Tensor]:
        """Everything that is kept of a pass, on the device."""
        documents = make_documents(lengths, self._target.device)
        reading = self._target.read(token_ids_T, documents, self._layout.taps)
        top_k = self._layout.top_k
        targets = describe_rows(
            reading.final_TD, rows_R, self._readout, self._draft_ids, top_k=top_k
        )
        taps = self._taps_codec.encode(reading.features_TF)
        largest_T = torch.linalg.vector_norm(reading.final_TD, ord=math.inf, dim=-1)
        return {
            _IS_FINITE: self._taps_codec.is_finite_T(taps) & largest_T.isfinite(),
            **_named(TAPS, taps),
            **self._coded_targets(targets),
        }

    def _coded_targets(self, targets: TargetRows) -> dict[str, Tensor]:
        greedy_R = _narrowed(targets.greedy_R, self._layout.vocab_size)
        arrays = {"greedy": greedy_R, "log_mass": targets.log_mass_R}
        if self._final_codec is not None and targets.final_RD is not None:
            arrays |= _named(FINAL, self._final_codec.encode(targets.final_RD))
        if targets.top_ids_RC is not None and targets.top_logprobs_RC is not None:
            arrays["top.ids"] = _narrowed(targets.top_ids_RC, self._layout.draft_vocab_size)
            arrays["top.logprobs"] = targets.top_logprobs_RC.half()
        return arrays

    def _sent(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        host = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
        if self._copies is not None:
            host = host.pin_memory()
        return host.to(self._target.device, non_blocking=True)

    def _to_host(self, pieces: tuple[_Piece, ...], arrays: dict[str, Tensor]) -> PassResult:
        if self._copies is None:
            return PassResult(pieces, arrays, None)
        self._copies.wait_stream(torch.cuda.current_stream(self._target.device))
        with torch.cuda.stream(self._copies):
            hosts = {name: _copy(tensor, self._copies) for name, tensor in arrays.items()}
            return PassResult(pieces, hosts, self._copies.record_event())


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _lay_out(samples: Sequence[tuple[int, Sample]]) -> tuple[_Piece, ...]:
    pieces = []
    token = label = 0
    for number, sample in samples:
        num_kept = kept_tokens(sample.loss_mask)
        num_labels = len(label_rows(sample.loss_mask))
        tokens = slice(token, token + read_tokens(num_kept))
        pieces.append(_Piece(number, sample, tokens, slice(label, label + num_labels)))
        token, label = tokens.stop, label + num_labels
    return tuple(pieces)


def _copy(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # The device may use the tensor's memory for something else only when the copy is done.
    tensor.record_stream(stream)
    return host


def _named(prefix: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in parts.items()}


def _narrowed(ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids as they are stored; the bits of int16 are those of uint16, which torch can copy."""
    return ids.to(torch.int16 if token_dtype(vocab_size) == "uint16" else torch.int32)


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    """As it is stored; numpy has no bfloat16: its bits are held as whole numbers."""
    is_two_bytes = tensor.dtype in (torch.bfloat16, torch.int16)
    bits = tensor.view(torch.uint16) if is_two_bytes else tensor
    array: NDArray[Any] = bits.numpy()
    return array
