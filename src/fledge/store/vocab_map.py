"""The draft vocabulary: which of the target's tokens a head can guess.

    d2t  [D] int64   draft token i is the target's token i + d2t[i]; ids ascend
    t2d  [V] bool    whether the target's token is in the draft vocabulary

Both are stored under these names in one safetensors file, as heads store them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.store.cache_publish import publish_file

VOCAB_MAP_NAME = "vocab_map.safetensors"


@dataclass(frozen=True, slots=True)
class VocabMap:
    """A draft vocabulary of one target."""

    target_ids: NDArray[np.int64]
    """The target's ids of the draft tokens, ascending."""

    vocab_size: int
    """Of the target."""

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def d2t(self) -> NDArray[np.int64]:
        return self.target_ids - np.arange(len(self.target_ids))

    @property
    def t2d(self) -> NDArray[np.bool_]:
        members = np.zeros(self.vocab_size, np.bool_)
        members[self.target_ids] = True
        return members

    def coverage(self, counts: NDArray[np.integer[Any]]) -> float:
        """Share of counted tokens that are in the draft vocabulary; 1 where none were counted."""
        total = int(counts.sum())
        return int(counts[self.target_ids].sum()) / total if total else 1.0

    def save(self, path: Path) -> None:
        publish_file(path, self.encode())

    @classmethod
    def load(cls, path: Path) -> "VocabMap":
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{path} holds no draft vocabulary ({error}); tokenize again."
            ) from error
        return cls.decode(content, str(path))

    def encode(self) -> bytes:
        return bytes(save({"d2t": self.d2t, "t2d": self.t2d}))

    @classmethod
    def decode(cls, content: bytes, file: str) -> "VocabMap":
        try:
            tensors = load(content)
            d2t, t2d = tensors["d2t"].astype(np.int64), tensors["t2d"].astype(np.bool_)
        except (SafetensorError, KeyError) as error:
            raise ArtifactError(
                f"{file} holds no draft vocabulary ({error}); tokenize again."
            ) from error
        target_ids = d2t + np.arange(len(d2t))
        if not np.array_equal(np.flatnonzero(t2d), target_ids):
            raise ArtifactError(f"d2t and t2d in {file} name different tokens; tokenize again.")
        return cls(target_ids, len(t2d))


def choose_vocabulary(
    counts: NDArray[np.integer[Any]], size: int, always: Iterable[int] = ()
) -> VocabMap:
    """The `size` most frequent tokens, lower ids first among equals; `always` are in it anyway.

    `counts` has one entry for each of the target's tokens. Where fewer occur, the lowest ids that
    do not fill the rest, since a head has a fixed number of rows.
    """
    vocab_size = len(counts)
    kept = sorted(set(always))
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise ConfigError(
            f"the target ends its answers with token id {kept[-1]}, and its vocabulary has ids 0 "
            f"to {vocab_size - 1}; its config and its tokenizer do not belong together."
        )
    if len(kept) > size:
        raise ConfigError(
            f"draft_vocab_size is {size}, and {len(kept)} tokens that end answers must be in it; "
            "make it larger."
        )
    weights = counts.astype(np.int64)
    weights[kept] = np.iinfo(np.int64).max
    # A stable sort leaves equals in the order of their ids.
    chosen = np.argsort(-weights, kind="stable")[:size]
    return VocabMap(np.sort(chosen).astype(np.int64), vocab_size)
