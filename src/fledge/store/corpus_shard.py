"""One file of a corpus: samples end to end, in safetensors, so that any program can read them.

    token_ids    [T] uint16 or uint32   the samples' tokens, end to end
    loss_mask    [T] uint8              1 where the target said the token
    offsets      [S+1] int64            sample s is token_ids[offsets[s] : offsets[s + 1]]
    source_ids   [S] uint16             index into the file's list of sources
    messages     [S] int32              index of the last message of the row that is in the sample
    row_ids      [B] uint8              the rows' ids as UTF-8, end to end
    row_offsets  [S+1] int64            the id of sample s is row_ids[row_offsets[s] : ...]

The one metadata entry, `fledge`, is a JSON text. A file appears whole or not at all, and the same
samples give the same bytes.
"""

import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from fledge.contracts.errors import ArtifactError
from fledge.store.cache_publish import publish_file

SHARD_PATTERN = "shard-*.safetensors"
LAYOUT = 1

_METADATA = "fledge"
_DTYPES: dict[str, tuple[str, ...]] = {
    "token_ids": ("U16", "U32"),
    "loss_mask": ("U8",),
    "offsets": ("I64",),
    "source_ids": ("U16",),
    "messages": ("I32",),
    "row_ids": ("U8",),
    "row_offsets": ("I64",),
}
_NUMPY = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8"}


class Sample(NamedTuple):
    """One sequence to train on."""

    token_ids: NDArray[np.unsignedinteger[Any]]
    loss_mask: NDArray[np.bool_]
    """True where the target said the token."""

    row_id: str
    source: str
    message: int
    """Index of the last message of the row that is in the sample."""


@dataclass(frozen=True, slots=True)
class ShardNote:
    """What a shard says about itself, beside its samples."""

    sources: tuple[str, ...]
    next_row: int
    """How many rows of the input this shard and those before it used up."""

    tally: dict[str, Any]
    """Counts of these rows."""


def shard_file(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_shard(
    path: Path, samples: Sequence[Sample], *, dtype: str, next_row: int, tally: dict[str, Any]
) -> None:
    """Write a shard that appears whole or not at all."""
    sources = {name: n for n, name in enumerate(dict.fromkeys(one.source for one in samples))}
    row_ids = [sample.row_id.encode() for sample in samples]
    tensors = {
        "token_ids": np.concatenate([sample.token_ids for sample in samples]).astype(dtype),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]).astype(np.uint8),
        "offsets": _offsets([len(sample.token_ids) for sample in samples]),
        "source_ids": np.array([sources[sample.source] for sample in samples], np.uint16),
        "messages": np.array([sample.message for sample in samples], np.int32),
        "row_ids": np.frombuffer(b"".join(row_ids), np.uint8),
        "row_offsets": _offsets([len(row_id) for row_id in row_ids]),
    }
    note = {"layout": LAYOUT, "sources": [*sources], "next_row": next_row, "tally": tally}
    # One entry only: the writer puts several in an order that differs from run to run.
    metadata = {_METADATA: json.dumps(note, ensure_ascii=False)}
    publish_file(path, save(tensors, metadata=metadata))


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class Shard:
    """A shard's arrays, mapped from the file: only what is looked at is read."""

    def __init__(self, path: Path) -> None:
        header, data_start = _read_header(path)
        try:
            note = json.loads(header["__metadata__"][_METADATA])
            self.note = ShardNote(tuple(note["sources"]), note["next_row"], note["tally"])
            self._arrays = {
                name: _map(path, header[name], data_start, dtypes)
                for name, dtypes in _DTYPES.items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{path} is not a shard of a corpus ({error!r}); tokenize again."
            ) from error
        self.path = path
        self.offsets = self._arrays["offsets"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def token_ids(self) -> NDArray[Any]:
        return self._arrays["token_ids"]

    @property
    def loss_mask(self) -> NDArray[Any]:
        return self._arrays["loss_mask"]

    @property
    def source_ids(self) -> NDArray[Any]:
        return self._arrays["source_ids"]

    def row_ids(self) -> list[bytes]:
        """The id of each sample's row, as UTF-8."""
        content, offsets = bytes(self._arrays["row_ids"]), self._arrays["row_offsets"].tolist()
        return [content[start:stop] for start, stop in itertools.pairwise(offsets)]

    def sample(self, number: int) -> Sample:
        start, stop = self.offsets[number : number + 2]
        first, last = self._arrays["row_offsets"][number : number + 2]
        return Sample(
            token_ids=np.asarray(self.token_ids[start:stop]),
            loss_mask=np.asarray(self.loss_mask[start:stop]).astype(np.bool_),
            row_id=bytes(self._arrays["row_ids"][first:last]).decode(),
            source=self.note.sources[self.source_ids[number]],
            message=int(self._arrays["messages"][number]),
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins."""
    try:
        with path.open("rb") as file:
            (header_len,) = struct.unpack("<Q", file.read(8))
            if header_len > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(header_len))
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no {path}; tokenize again.") from error
    except (struct.error, ValueError) as error:
        raise ArtifactError(f"{path} is damaged ({error}); tokenize again.") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{path} is damaged (no table in its header); tokenize again.")
    return header, 8 + header_len


def _map(
    path: Path, entry: dict[str, Any], data_start: int, dtypes: tuple[str, ...]
) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    if entry["dtype"] not in dtypes:
        raise ValueError(f"type {entry['dtype']} instead of {dtypes[0]}")
    dtype = np.dtype(_NUMPY[entry["dtype"]])
    if start == stop:
        return np.empty(0, dtype)
    shape = ((stop - start) // dtype.itemsize,)
    # A plain array that looks into the map: parts of it are cut out ten times as fast.
    return np.asarray(np.memmap(path, dtype, "r", data_start + start, shape))
