"""Features in object stores: the bytes of a local run, whatever the network does meanwhile."""

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
import torch

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.features.reader import FeatureReader
from fledge.store.place import LOCK_NAME
from fledge.store.places import open_place
from tests.unit.features.invented_features import (
    assert_same,
    invent_layout,
    invent_plan,
    invent_samples,
    vocabulary,
    write_features,
)
from tests.unit.store.object_servers import Cloud
from tests.warm_programs import WarmPrograms

LAYOUT = invent_layout()
SAMPLES = invent_samples(LAYOUT, 12)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return write_features(tmp_path_factory.mktemp("local"), LAYOUT, SAMPLES)


def assert_same_files(address: str, local: FeatureStore) -> None:
    place = open_place(address)
    names = {name for name in local.place.names() if name.endswith(".safetensors")}
    assert {name for name in place.names() if name.endswith(".safetensors")} == names
    for name in names:
        assert place.read(name) == local.place.read(name), name
    assert FeatureStore.open(address).manifest.fingerprint == local.manifest.fingerprint


def test_written_and_read_while_requests_fail(cloud: Cloud, local: FeatureStore) -> None:
    address = f"{cloud.root}/faulty/features"
    cloud.gateway.share = 0.25
    store = write_features(address, LAYOUT, SAMPLES)
    for place in (11, 0, 5):
        assert_same(store.read(place), SAMPLES[place])
    near, far = (
        list(FeatureReader(features, batch_tokens=80, seed=1, prefetch=3))
        for features in (local, store)
    )
    assert len(near) == len(far)
    for one, other in zip(near, far, strict=True):
        assert one.sample_numbers == other.sample_numbers
        assert torch.equal(one.features_TF, other.features_TF)
    assert len([fault for _, _, fault in cloud.gateway.seen if fault]) > 5
    cloud.gateway.share = 0
    assert_same_files(address, local)
    store.verify()


def test_samples_are_read_by_range(cloud: Cloud, local: FeatureStore) -> None:
    store = write_features(f"{cloud.root}/ranges", LAYOUT, SAMPLES)
    cloud.gateway.seen.clear()
    store.read(7)
    assert len(cloud.gateway.seen) == 1, "one request for one sample"


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from fledge.features.feature_writer import FeatureWriter
plan, vocab_map, channels, samples = pickle.loads(Path(sys.argv[2]).read_bytes())
with FeatureWriter.open(sys.argv[1], plan, vocab_map) as writer:
    writer.channels = channels
    writer.write_shard(0, samples[:4], {"shard": 0})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_is_followed_by_another(
    warm: WarmPrograms, cloud: Cloud, local: FeatureStore, tmp_path: Path
) -> None:
    address = f"{cloud.root}/killed"
    given = (invent_plan(LAYOUT), vocabulary(), local.channels, SAMPLES)
    (tmp_path / "given").write_bytes(pickle.dumps(given))
    killed = warm.start(
        [sys.executable, "-c", KILLED, address, tmp_path / "given"],
        env={**os.environ, **cloud.environment},
    )
    assert killed.wait() == -signal.SIGKILL
    names = open_place(address).names()
    assert LOCK_NAME in names
    assert [name for name in names if name.startswith("shard-")] == ["shard-00000.safetensors"]
    write_features(address, LAYOUT, SAMPLES)
    assert_same_files(address, local)
    assert LOCK_NAME not in open_place(address).names()


def test_refusals_are_those_of_a_local_directory(cloud: Cloud) -> None:
    address = f"{cloud.root}/refused"
    store = write_features(address, LAYOUT, SAMPLES)
    other = invent_plan(invent_layout("q5"))
    with pytest.raises(
        MismatchError,
        match=rf"{address} holds finished work with identity.features.features = 'q8', and this "
        "run has identity.features.features = 'q5'",
    ):
        FeatureWriter.open(address, other, vocabulary()).__enter__()
    shard = "shard-00001.safetensors"
    content = bytearray(store.place.read(shard) or b"")
    content[int(store.index.starts[5]) + 9] ^= 1
    store.place.replace(shard, bytes(content))
    with pytest.raises(
        ArtifactError, match=rf"{address}/{shard} is damaged: sample 15 of the corpus has checksum"
    ):
        store.read(5)
    store.place.replace(shard, bytes(content[:-16]))
    with pytest.raises(ArtifactError, match=rf"{address}/{shard} is \d+ bytes long, and the man"):
        FeatureStore.open(address)
    store.place.remove(shard)
    with pytest.raises(ArtifactError, match=rf"{address}/{shard} is missing"):
        FeatureStore.open(address)
    with pytest.raises(ArtifactError, match=r"/nothing has no manifest.json: it is unfinished"):
        FeatureStore.open(f"{cloud.root}/nothing")
