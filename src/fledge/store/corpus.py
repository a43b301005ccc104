"""Finished corpora: samples by number, without holding them in memory."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.store.corpus_shard import SHARD_PATTERN, Sample, Shard
from fledge.store.hashing import hash_part
from fledge.store.manifest import CORPUS, Manifest, read_input
from fledge.store.packing import PackingPlan, pack
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap


class Samples:
    """Samples of some files, in order."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        found = [np.diff(shard.offsets) for shard in self.shards]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        place = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[place - 1]) if place else 0
        return self.shards[place].sample(number - before)

    def __iter__(self) -> Iterator[Sample]:
        for shard in self.shards:
            for number in range(len(shard)):
                yield shard.sample(number)


class Corpus(Samples):
    """Samples of one directory, in order.

    corpus = Corpus.open(Path("corpus"))
    corpus[7].token_ids, corpus[7].loss_mask
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        names = [name for name in manifest.files if Path(name).match(SHARD_PATTERN)]
        ordered = sorted(names, key=lambda name: (len(name), name))
        super().__init__([Shard(directory / name) for name in ordered])

    @classmethod
    def open(cls, directory: Path) -> "Corpus":
        """A corpus whose files are all there and as long as they were."""
        return cls(directory, read_input(directory, CORPUS))

    def verify(self, progress: Progress | None = None) -> None:
        """Read every byte and compare it with what was written."""
        shown, files = progress or SilentProgress(), self.manifest.files
        num_bytes = sum(int(entry["bytes"]) for entry in files.values())
        with shown.task(f"checking {self.directory}", num_bytes) as task:
            for name, entry in files.items():
                path = self.directory / name
                if hash_part(path, task) != entry["sha256"]:
                    raise ArtifactError(
                        f"{path} was changed since it was written; tokenize into a new directory."
                    )

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def identity(self) -> Mapping[str, Any]:
        """Target and tokenizer that the token ids belong to."""
        return self.manifest.plan.identity

    @cached_property
    def vocab_map(self) -> VocabMap:
        return VocabMap.load(self.directory / VOCAB_MAP_NAME)

    def packed(self, length: int) -> PackingPlan:
        """Which samples make up sequences of `length` tokens."""
        return pack(self.lengths, length)


class Corpora(Samples):
    """Samples of several corpora for one target, one corpus behind the other."""

    def __init__(self, parts: Sequence[Corpus]) -> None:
        self.parts = tuple(parts)
        for place, part in enumerate(self.parts):
            same = [one for one in self.parts[:place] if one.fingerprint == part.fingerprint]
            if same:
                raise ConfigError(
                    f"{same[0].directory} and {part.directory} hold the same corpus; give it once, "
                    "and name in train.sources what is to be learned more often."
                )
        super().__init__([shard for part in self.parts for shard in part.shards])

    @property
    def vocab_map(self) -> VocabMap:
        """That of the first one."""
        return self.parts[0].vocab_map

    @property
    def parents(self) -> dict[str, str]:
        """Their fingerprints, as a head's manifest names them."""
        names = [CORPUS, *(f"{CORPUS} {number}" for number in range(2, len(self.parts) + 1))]
        return dict(zip(names, (part.fingerprint for part in self.parts), strict=True))

    def verify(self, progress: Progress | None = None) -> None:
        """Read every byte and compare it with what was written."""
        for part in self.parts:
            part.verify(progress)


def corpus_fingerprints(parents: Mapping[str, str]) -> list[str]:
    """The corpora among the parents of a head, the first one first."""
    return [found for name, found in parents.items() if name.partition(" ")[0] == CORPUS]
