"""Where every sample of a finished directory of features lies: one file, read when it is opened.

The shards' own indices one after the other, with `shards`, the place of each sample's shard among
the names in the metadata, beside them. In safetensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fledge.contracts.errors import ArtifactError
from fledge.store.feature_shard import INDEX_TYPES, SampleCounts, ShardHead

INDEX_NAME = "index.safetensors"
_METADATA = "fledge"


@dataclass(frozen=True, slots=True)
class FeatureIndex:
    """Samples in the order of the shards, and of the corpus within a shard."""

    names: tuple[str, ...]
    """Of the shards."""

    shards: NDArray[np.int32]
    """Place of each sample's shard among the names."""

    numbers: NDArray[np.int64]
    row_hashes: NDArray[np.uint64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    xxh3: NDArray[np.uint64]
    counts: NDArray[np.int32]
    """[N, 3]: tokens, feature rows, label rows."""

    def __len__(self) -> int:
        return len(self.numbers)

    def counts_of(self, place: int) -> SampleCounts:
        return SampleCounts(*map(int, self.counts[place]))

    @classmethod
    def gather(cls, heads: Mapping[str, ShardHead]) -> "FeatureIndex":
        """The index of these shards, in the order given."""
        lengths = [len(head.index["numbers"]) for head in heads.values()]
        shards = np.repeat(np.arange(len(heads), dtype=np.int32), lengths)
        empty = {
            name: np.empty((0, 3) if name == "counts" else 0, INDEX_TYPES[name])
            for name in INDEX_TYPES
        }
        columns = {
            name: np.concatenate([empty[name], *(head.index[name] for head in heads.values())])
            for name in INDEX_TYPES
        }
        return cls(names=tuple(heads), shards=shards, **columns)

    def encode(self) -> bytes:
        columns = {name: np.ascontiguousarray(getattr(self, name)) for name in INDEX_TYPES}
        told = json.dumps({"shards": list(self.names)}, ensure_ascii=False)
        return bytes(save({**columns, "shards": self.shards}, metadata={_METADATA: told}))

    @classmethod
    def decode(cls, content: bytes, file: str) -> "FeatureIndex":
        try:
            tensors = load(content)
            header_len = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + header_len])
            names = json.loads(header["__metadata__"][_METADATA])["shards"]
            columns: dict[str, Any] = {name: tensors[name] for name in (*INDEX_TYPES, "shards")}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{file} is of no known kind ({error}); remove it and manifest.json and capture "
                "again: shards that are there are kept."
            ) from error
        return cls(names=tuple(names), **columns)
