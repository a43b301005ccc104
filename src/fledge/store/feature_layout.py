"""What is kept of each sample, by name, type and width: the same for all samples of a directory.

    token_ids, loss_mask             for each token up to the last that has loss: N tokens
    taps.*                           tapped layers of tokens 0 .. N-3
    final.* or top.*                 the target's distribution where a label is reached
    greedy, log_mass                 beside it

Token j+1 is a label where j >= 1 and loss_mask[j+1]; its distribution is that of row j.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.errors import ArtifactError
from fledge.store.corpus_shard import token_dtype

Counted = Literal["tokens", "features", "labels"]
"""What a part has one row for."""

NUMPY_TYPES = {
    "uint8": "<u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "float16": "<f2",
    "float32": "<f4",
    "bfloat16": "<u2",
}
"""numpy has no bfloat16: its bits are held as whole numbers."""

_DTYPES = {name: np.dtype(code) for name, code in NUMPY_TYPES.items()}


class Part(NamedTuple):
    """One array of a sample."""

    dtype: str
    columns: int | None
    """None: a row is one number."""

    counted: Counted

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.numpy_dtype.itemsize * (1 if self.columns is None else self.columns)

    def shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if self.columns is None else (num_rows, self.columns)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """What is stored of one sample."""

    number: int
    """Of the corpus."""

    row_hash: int
    """xxh3 of the id of the row it was made of; samples of one conversation share it."""

    token_ids: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    rows: Mapping[str, NDArray[Any]]
    """Every other part of the layout by its name, such as `taps.codes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLayout:
    """What every sample of a directory consists of."""

    taps: tuple[int, ...]
    """Completed layers."""

    hidden_size: int
    dtype: str
    """What the target computed in: `float32`, `bfloat16` or `float16`."""

    features: FeatureFormat
    target: Literal["hidden", "topk"]
    target_features: FeatureFormat | None
    """Of final hidden rows; None with `topk`."""

    top_k: int | None
    """None with `hidden`."""

    vocab_size: int
    draft_vocab_size: int
    coded: Mapping[str, Part] = field(hash=False)
    """The parts that a codec makes, by name: `taps.codes`, `final.values` and so on."""

    @property
    def row_width(self) -> int:
        """Values of a row of features."""
        return len(self.taps) * self.hidden_size

    @property
    def parts(self) -> dict[str, Part]:
        """Everything that is stored of a sample."""
        ids = token_dtype(self.vocab_size)
        parts = {
            "token_ids": Part(ids, None, "tokens"),
            "loss_mask": Part("uint8", None, "tokens"),
            **self.coded,
            "greedy": Part(ids, None, "labels"),
            "log_mass": Part("float32", None, "labels"),
        }
        if self.top_k is not None:
            parts["top.ids"] = Part(token_dtype(self.draft_vocab_size), self.top_k, "labels")
            parts["top.logprobs"] = Part("float16", self.top_k, "labels")
        return parts

    def bytes_per(self, counted: Counted) -> int:
        """Bytes that each token, feature row or label row takes."""
        return sum(part.row_bytes for part in self.parts.values() if part.counted == counted)

    def to_json(self) -> dict[str, Any]:
        """For a plan's identity, under the name `features`."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "coded"}
        coded = {name: list(part) for name, part in self.coded.items()}
        return {**plain, "taps": list(self.taps), "coded": coded}

    @classmethod
    def from_json(cls, table: Mapping[str, Any], where: str) -> "FeatureLayout":
        try:
            coded = {name: Part(*part) for name, part in table["coded"].items()}
            unknown = [part.dtype for part in coded.values() if part.dtype not in NUMPY_TYPES]
            if unknown:
                raise ValueError(f"type {unknown[0]}")
            return cls(**{**table, "taps": tuple(table["taps"]), "coded": coded})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{where} says in no known way what its features are ({error!r}); capture again."
            ) from error
