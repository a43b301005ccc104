"""Writes features shard by shard, each once and whole; a killed run goes on with those missing.

with FeatureWriter.open("features", plan, vocab_map) as writer:
    if not writer.is_finished:
        for number in range(num_shards):
            if number not in writer.finished:
                writer.write_shard(number, samples_of(number))
        writer.finish(counts={...}, device="cpu")
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.store.channels import CHANNELS_NAME, Channels
from fledge.store.feature_index import INDEX_NAME, FeatureIndex
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.feature_shard import ShardHead, ShardNote, encode_shard, read_head
from fledge.store.manifest import Manifest, Plan
from fledge.store.place import Place
from fledge.store.places import open_place
from fledge.store.stage_directory import StageDirectory, open_stage_at
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap

_HEADS_AT_ONCE = 8
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_names(place: Place) -> dict[int, tuple[str, int]]:
    """Names and sizes of the shards that are there, by number."""
    found = {
        int(match[1]): (name, size)
        for name, size in place.sizes().items()
        if (match := _SHARD.fullmatch(name))
    }
    return dict(sorted(found.items()))


class FeatureWriter:
    """The one writer of a directory of features."""

    def __init__(self, stage: StageDirectory, vocab_map: VocabMap) -> None:
        self._stage = stage
        self._place = stage.place
        self._vocab_map = vocab_map
        self._plan_id = plan_id(stage.plan)
        self.layout = FeatureLayout.from_json(stage.plan.identity["features"], str(self._place))
        self._heads: dict[int, ShardHead] = {}
        if not stage.is_finished:
            found = shard_names(self._place)
            # In an object store each takes a round trip.
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
                heads = pool.map(lambda file: self._read_own(*file), found.values())
                self._heads.update(zip(found, heads, strict=True))

    @classmethod
    @contextmanager
    def open(
        cls, address: str | Path, plan: Plan, vocab_map: VocabMap
    ) -> Iterator["FeatureWriter"]:
        """Make or reopen the directory of a plan whose identity has a layout as `features`."""
        place = open_place(address)
        with open_stage_at(place, plan, has_results=lambda at: bool(shard_names(at))) as stage:
            yield cls(stage, vocab_map)

    @property
    def is_finished(self) -> bool:
        return self._stage.is_finished

    @property
    def manifest(self) -> Manifest:
        return self._stage.manifest

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the shards that are there."""
        return frozenset(self._heads)

    @property
    def tallies(self) -> dict[int, Mapping[str, Any]]:
        """What `write_shard` was told beside each finished shard, in this run or before."""
        return {number: self._heads[number].note.tally for number in sorted(self._heads)}

    @property
    def channels(self) -> Channels | None:
        """What the shards are coded with; None where features are stored exactly."""
        if self.layout.features == "exact":
            return None
        content, width = self._place.read(CHANNELS_NAME), self.layout.row_width
        if content is None:
            raise ArtifactError(
                f"{self._place.file(CHANNELS_NAME)} is gone, and the features beside it were coded "
                "with it; capture into a new directory."
            )
        return Channels.decode(content, self._place.file(CHANNELS_NAME), width)

    @channels.setter
    def channels(self, channels: Channels) -> None:
        assert not self.finished
        self._place.replace(CHANNELS_NAME, channels.encode())

    def write_shard(
        self,
        number: int,
        samples: Sequence[EncodedSample],
        tally: Mapping[str, Any] | None = None,
    ) -> int:
        """Write one shard; returns its bytes. A shard of the same bytes may be there already."""
        name = shard_name(number)
        note = ShardNote(self._plan_id, dict(tally or {}))
        chunks, head = encode_shard(samples, self.layout, note)
        if not self._place.create(name, chunks):
            there = self._read_own(name, self._place.sizes()[name])
            if there.sha256 != head.sha256:
                raise MismatchError(
                    f"{self._place.file(name)} is there with sha256 {there.sha256} of its head, "
                    f"and this run made {head.sha256}; remove the file to have it made anew."
                )
        self._heads[number] = head
        return head.num_bytes

    def finish(self, *, counts: Mapping[str, Any], device: str) -> Manifest:
        """Write the index and the manifest: the directory is whole."""
        heads = {shard_name(number): self._heads[number] for number in sorted(self._heads)}
        files: dict[str, Mapping[str, Any]] = {
            name: {"bytes": head.num_bytes, "sha256": head.sha256} for name, head in heads.items()
        }
        whole = {
            INDEX_NAME: FeatureIndex.gather(heads).encode(),
            VOCAB_MAP_NAME: self._vocab_map.encode(),
        }
        channels = self.channels
        if channels is not None:
            whole[CHANNELS_NAME] = channels.encode()
        for name, content in whole.items():
            self._place.replace(name, content)
            sha256 = hashlib.sha256(content).hexdigest()
            files[name] = {"bytes": len(content), "sha256": sha256}
        return self._stage.seal(counts=counts, files=files, device=device)

    def _read_own(self, name: str, size: int) -> ShardHead:
        head = read_head(self._place, name, size)
        if head.note.plan != self._plan_id:
            raise MismatchError(
                f"{self._place.file(name)} was made for a plan with sha256 {head.note.plan}, and "
                f"this run's plan has {self._plan_id}; choose another directory, or remove the "
                "file."
            )
        return head


def plan_id(plan: Plan) -> str:
    """sha256 of a plan, which each of its shards carries."""
    return hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode()).hexdigest()
