"""A finished directory of features: samples by number, checked as they are read."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.features.read_ahead import read_ahead
from fledge.store.channels import CHANNELS_NAME, Channels
from fledge.store.feature_index import INDEX_NAME, FeatureIndex
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.feature_shard import lay_out_sample, read_head, unpack_arrays
from fledge.store.manifest import FEATURES, MANIFEST_NAME, Manifest, read_input
from fledge.store.place import Place
from fledge.store.places import open_place
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap

_THREADS = 4
_VERIFIED_BYTES = 256 << 20
_REMEDY = (
    f"Remove this file, {INDEX_NAME} and {MANIFEST_NAME} and capture again: only these are made "
    "anew."
)

_LOST = "Everything beside it was coded with it: capture into a new directory."


class FeatureStore:
    """Samples of one directory; may be used by many threads at once.

    store = FeatureStore.open("features")
    sample = store.read(7)
    """

    def __init__(self, place: Place, manifest: Manifest, index: FeatureIndex) -> None:
        self.place = place
        self.manifest = manifest
        self.index = index
        self.layout = FeatureLayout.from_json(manifest.plan.identity["features"], str(place))

    @classmethod
    def open(cls, address: str | Path) -> "FeatureStore":
        """Features whose files are all there and as long as they were."""
        place = open_place(address)
        manifest = read_input(place, FEATURES)
        content = _read_whole(place, manifest, INDEX_NAME)
        return cls(place, manifest, FeatureIndex.decode(content, place.file(INDEX_NAME)))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that are kept of each sample."""
        return self.index.counts[:, 0].astype(np.int64)

    @property
    def num_labels(self) -> NDArray[np.int64]:
        """Label rows of each sample."""
        return self.index.counts[:, 2].astype(np.int64)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Of each sample in the corpus."""
        return self.index.numbers

    @property
    def row_hashes(self) -> NDArray[np.uint64]:
        """xxh3 of the id of each sample's row; samples of one conversation share it."""
        return self.index.row_hashes

    @property
    def identity(self) -> Mapping[str, Any]:
        """Target, tokenizer, layers, dtype: what training must agree with."""
        return self.manifest.plan.identity

    @cached_property
    def vocab_map(self) -> VocabMap:
        content = _read_whole(self.place, self.manifest, VOCAB_MAP_NAME)
        return VocabMap.decode(content, self.place.file(VOCAB_MAP_NAME))

    @cached_property
    def channels(self) -> Channels | None:
        """What features are decoded with; None where they are stored exactly."""
        if self.layout.features == "exact":
            return None
        content = _read_whole(self.place, self.manifest, CHANNELS_NAME)
        return Channels.decode(content, self.place.file(CHANNELS_NAME), self.layout.row_width)

    def read(self, place: int) -> EncodedSample:
        """A sample by its place in this store, not by its number in the corpus."""
        if not 0 <= place < len(self):
            raise IndexError(f"sample {place} of {len(self)}")
        index = self.index
        name = index.names[index.shards[place]]
        data = self.place.read_range(name, int(index.starts[place]), int(index.sizes[place]))
        self._check(place, xxh3_64_intdigest(data))
        arrays = unpack_arrays(data, self.layout, index.counts_of(place))
        token_ids, loss_mask = arrays.pop("token_ids"), arrays.pop("loss_mask").view(np.bool_)
        number, row_hash = int(index.numbers[place]), int(index.row_hashes[place])
        return EncodedSample(number, row_hash, token_ids, loss_mask, arrays)

    def read_into(self, place: int, parts: Mapping[str, memoryview]) -> None:
        """The bytes of a sample's parts into memory of the caller's, checked."""
        index = self.index
        name = index.names[index.shards[place]]
        places, size = lay_out_sample(self.layout, index.counts_of(place))
        buffers = [parts[part] for part in places]
        buffers.append(memoryview(bytearray(size - sum(map(len, buffers)))))
        buffers = [buffer for buffer in buffers if len(buffer)]
        self.place.read_into(name, int(index.starts[place]), buffers)
        digest = xxh3_64()
        for buffer in buffers:
            digest.update(buffer)
        self._check(place, digest.intdigest())

    def _check(self, place: int, found: int) -> None:
        index = self.index
        expected = int(index.xxh3[place])
        if found != expected:
            name = index.names[index.shards[place]]
            raise ArtifactError(
                f"{self.place.file(name)} is damaged: sample {index.numbers[place]} of the corpus "
                f"has checksum {found:016x} and should have {expected:016x}. {_REMEDY}"
            )

    def verify(self, progress: Progress | None = None) -> None:
        """Read every byte and compare it with what was written."""
        shown = progress or SilentProgress()
        for name in self.manifest.files.keys() - set(self.index.names):
            _read_whole(self.place, self.manifest, name)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._verify_head, self.index.names))
        sizes = [int(size) for size in self.index.sizes]
        room = max(_VERIFIED_BYTES, *sizes, 0)
        places = range(len(self))
        samples = read_ahead(self.read, places, sizes, threads=_THREADS, max_bytes=room)
        with shown.task(f"checking {self.place}", sum(sizes)) as task, closing(samples):
            for size, _ in zip(sizes, samples, strict=True):
                task.advance(size)

    def _verify_head(self, name: str) -> None:
        entry = self.manifest.files[name]
        head = read_head(self.place, name, entry["bytes"])
        if head.sha256 != entry["sha256"]:
            raise ArtifactError(
                f"{self.place.file(name)} is damaged: its head has sha256 {head.sha256} and "
                f"should have {entry['sha256']}. {_REMEDY}"
            )


def _read_whole(place: Place, manifest: Manifest, name: str) -> bytes:
    """A file that the manifest has the sha256 of."""
    content = place.read(name) or b""
    found, expected = hashlib.sha256(content).hexdigest(), manifest.files[name]["sha256"]
    if found != expected:
        remedy = _LOST if name == CHANNELS_NAME else _REMEDY
        raise ArtifactError(
            f"{place.file(name)} is damaged: it has sha256 {found} and should have {expected}. "
            f"{remedy}"
        )
    return content
