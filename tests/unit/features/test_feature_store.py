"""Features on disk: what was written comes back, work goes on where it stopped, damage is named."""

import json
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file

from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, MismatchError
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.store.feature_index import INDEX_NAME, FeatureIndex
from fledge.store.manifest import MANIFEST_NAME, Plan
from fledge.store.stage_directory import open_stage
from tests.unit.features.invented_features import (
    assert_same,
    invent_channels,
    invent_layout,
    invent_plan,
    invent_samples,
    vocabulary,
    write_features,
)

LAYOUT = invent_layout()
SAMPLES = invent_samples(LAYOUT, 10)
FORMATS = [
    ("exact", "hidden", torch.float32),
    ("exact", "hidden", torch.bfloat16),
    ("exact", "topk", torch.float16),
    ("q5", "hidden", torch.bfloat16),
    ("q4", "topk", torch.float32),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features")
    write_features(path, LAYOUT, SAMPLES)
    return path


@pytest.fixture
def features(finished: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return shutil.copytree(finished, tmp_path / "features")


@pytest.mark.parametrize(("form", "target", "dtype"), FORMATS)
def test_samples_come_back(tmp_path: Path, form: str, target: str, dtype: torch.dtype) -> None:
    layout = invent_layout(form, target, dtype)
    samples = invent_samples(layout, 7)
    store = write_features(tmp_path, layout, samples, per_shard=3)
    assert len(store) == 7
    assert store.layout == layout
    assert store.numbers.tolist() == [sample.number for sample in samples]
    assert store.row_hashes.tolist() == [sample.row_hash for sample in samples]
    assert store.lengths.tolist() == [len(sample.token_ids) for sample in samples]
    assert store.num_labels.tolist() == [int(one.loss_mask[2:].sum()) for one in samples]
    assert store.identity["target"] == "tiny"
    assert store.vocab_map.target_ids.tolist() == vocabulary().target_ids.tolist()
    for place in (6, 0, 3):
        assert_same(store.read(place), samples[place])
    with pytest.raises(IndexError, match="sample 7 of 7"):
        store.read(7)
    store.verify()


@pytest.mark.parametrize(("form", "target", "dtype"), FORMATS)
def test_shards_are_safetensors(tmp_path: Path, form: str, target: str, dtype: torch.dtype) -> None:
    layout = invent_layout(form, target, dtype)
    samples = invent_samples(layout, 5)
    write_features(tmp_path, layout, samples, per_shard=5)
    tensors = load_torch_file(tmp_path / "shard-00000.safetensors")
    for sample in samples:
        for name, array in sample.rows.items():
            found = tensors[f"{sample.number}.{name}"]
            if name == "taps.values":
                assert found.dtype is dtype
            assert found.shape == array.shape
        ids = tensors[f"{sample.number}.token_ids"]
        assert ids.tolist() == sample.token_ids.tolist()


def test_the_index_alone_says_where_samples_lie(finished: Path) -> None:
    index = load_file(finished / INDEX_NAME)
    data = (finished / "shard-00001.safetensors").read_bytes()
    place = 5
    assert index["shards"][place] == 1
    start = int(index["starts"][place])
    log_mass = np.frombuffer(data, "<f4", int(index["counts"][place][2]), start)
    assert log_mass.tolist() == SAMPLES[place].rows["log_mass"].tolist()
    assert np.all(index["starts"] % 16 == 0)


def test_the_same_samples_give_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    write_features(tmp_path, LAYOUT, SAMPLES)
    for path in finished.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_work_goes_on_where_it_stopped(finished: Path, tmp_path: Path) -> None:
    plan = invent_plan(LAYOUT)
    with FeatureWriter.open(tmp_path, plan, vocabulary()) as writer:
        writer.channels = invent_channels(LAYOUT)
        writer.write_shard(2, SAMPLES[8:], {"shard": 2})
    (tmp_path / ".shard-00000.safetensors.tmp").write_bytes(b"half a sh")
    (tmp_path / "shard-00002 (copy).safetensors").write_bytes(b"somebody's")
    with pytest.raises(ArtifactError, match=r"has no manifest.json: it is unfinished"):
        FeatureStore.open(tmp_path)
    with FeatureWriter.open(tmp_path, plan, vocabulary()) as writer:
        assert not writer.is_finished
        assert writer.finished == {2}
        assert writer.tallies == {2: {"shard": 2}}
        # A request whose answer was lost is made again: nothing changes.
        writer.write_shard(2, SAMPLES[8:], {"shard": 2})
    again = write_features(tmp_path, LAYOUT, SAMPLES)
    assert again.manifest.fingerprint == FeatureStore.open(finished).manifest.fingerprint
    with FeatureWriter.open(tmp_path, plan, vocabulary()) as writer:
        assert writer.is_finished
        assert writer.manifest.counts == {"samples": 10}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_shard_is_written_once(tmp_path: Path) -> None:
    with FeatureWriter.open(tmp_path, invent_plan(LAYOUT), vocabulary()) as writer:
        size = writer.write_shard(0, SAMPLES[:3])
        assert (tmp_path / "shard-00000.safetensors").stat().st_size == size
        with pytest.raises(
            MismatchError,
            match=r"shard-00000.safetensors is there with sha256 \w{64} of its head, and this run "
            r"made \w{64}; remove the file",
        ):
            writer.write_shard(0, SAMPLES[:2])


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        FeatureWriter.open(tmp_path, invent_plan(LAYOUT), vocabulary()),
        pytest.raises(ArtifactError, match="another fledge process is writing"),
    ):
        FeatureWriter.open(tmp_path, invent_plan(LAYOUT), vocabulary()).__enter__()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            invent_layout(dtype=torch.bfloat16),
            "identity.features.dtype = 'float32', and this run has identity.features.dtype = "
            "'bfloat16'",
        ),
        (invent_layout("q5"), "identity.features.features = 'q8', and this run has .* = 'q5'"),
        (invent_layout(hidden_size=64), "identity.features.hidden_size = 32, .* = 64"),
    ],
)
def test_other_features_in_the_directory(features: Path, other, message: str) -> None:
    with pytest.raises(MismatchError, match=f"holds finished work with {message}"):
        FeatureWriter.open(features, invent_plan(other), vocabulary()).__enter__()
    (features / MANIFEST_NAME).unlink()
    with pytest.raises(MismatchError, match=f"holds unfinished work with {message}"):
        FeatureWriter.open(features, invent_plan(other), vocabulary()).__enter__()


def test_a_directory_without_shards_may_be_planned_anew(tmp_path: Path) -> None:
    with FeatureWriter.open(tmp_path, invent_plan(LAYOUT), vocabulary()):
        pass
    write_features(tmp_path, invent_layout("q5"), invent_samples(invent_layout("q5"), 3))
    assert FeatureStore.open(tmp_path).layout.features == "q5"


def test_every_flipped_bit_is_found_and_named(features: Path) -> None:
    store = FeatureStore.open(features)
    shard = features / "shard-00001.safetensors"
    whole = shard.read_bytes()
    chance = np.random.default_rng(1)
    for place in range(4, 8):
        start, size = int(store.index.starts[place]), int(store.index.sizes[place])
        for _ in range(5):
            bit = int(chance.integers(start * 8, (start + size) * 8))
            spoiled = bytearray(whole)
            spoiled[bit // 8] ^= 1 << bit % 8
            shard.write_bytes(spoiled)
            number = SAMPLES[place].number
            message = (
                rf"shard-00001.safetensors is damaged: sample {number} of the corpus has checksum "
                rf"\w{{16}} and should have {int(store.index.xxh3[place]):016x}"
            )
            with pytest.raises(ArtifactError, match=message):
                store.read(place)
            with pytest.raises(ArtifactError, match=message):
                store.verify()
            store.read(place - 1 if place > 4 else place + 1)


def test_a_flipped_bit_before_the_samples(features: Path) -> None:
    store = FeatureStore.open(features)
    shard = features / "shard-00001.safetensors"
    whole = shard.read_bytes()
    chance = np.random.default_rng(2)
    for _ in range(40):
        bit = int(chance.integers(0, int(store.index.starts[4]) * 8))
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(spoiled)
        with pytest.raises((ArtifactError, MismatchError), match=r"shard-00001.safetensors"):
            store.verify()


def test_a_damaged_shard_is_made_anew(features: Path) -> None:
    """As the message says."""
    for name in ("shard-00001.safetensors", INDEX_NAME, MANIFEST_NAME):
        (features / name).unlink()
    with FeatureWriter.open(features, invent_plan(LAYOUT), vocabulary()) as writer:
        assert writer.finished == {0, 2}
    write_features(features, LAYOUT, SAMPLES).verify()


@pytest.mark.parametrize("name", ["shard-00001.safetensors", INDEX_NAME, "vocab_map.safetensors"])
def test_files_that_are_missing_or_cut_off(features: Path, name: str) -> None:
    path = features / name
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 7)
    message = f"{name} is {size - 7} bytes long, and the manifest says {size} bytes"
    with pytest.raises(ArtifactError, match=message):
        FeatureStore.open(features)
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing, and the manifest says {size}"):
        FeatureStore.open(features)


def test_shards_that_vanish_or_shrink_while_they_are_read(features: Path) -> None:
    store = FeatureStore.open(features)
    shard = features / "shard-00000.safetensors"
    with shard.open("r+b") as file:
        file.truncate(int(store.index.starts[3]) + 5)
    store.read(2)
    with pytest.raises(ArtifactError, match=r"shard-00000.safetensors ends at byte \d+, and bytes"):
        store.read(3)
    shard.unlink()
    with pytest.raises(
        ArtifactError, match=r"shard-00000.safetensors is not there .* make it again"
    ):
        store.read(2)


@pytest.mark.parametrize("keep", [0, 5, 40, 2000, -1])
def test_a_shard_cut_off_is_no_finished_work(features: Path, keep: int) -> None:
    (features / MANIFEST_NAME).unlink()
    shard = features / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=r"shard-00001.safetensors (is damaged|has \d+ bytes)"):
        FeatureWriter.open(features, invent_plan(LAYOUT), vocabulary()).__enter__()


def _respell(shard: Path, old: str, new: str) -> None:
    content = shard.read_bytes()
    assert old.encode() in content
    shard.write_bytes(content.replace(old.encode(), new.encode(), 1))


def test_a_shard_of_another_version(features: Path) -> None:
    (features / MANIFEST_NAME).unlink()
    _respell(features / "shard-00001.safetensors", r"{\"layout\": 1", r"{\"layout\": 7")
    with pytest.raises(
        MismatchError, match=r"shard-00001.safetensors has layout 7 and this fledge reads 1"
    ):
        FeatureWriter.open(features, invent_plan(LAYOUT), vocabulary()).__enter__()


def test_a_shard_of_another_plan(features: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    plan = invent_plan(LAYOUT, day="yesterday")
    with FeatureWriter.open(other, plan, vocabulary()) as writer:
        writer.write_shard(1, SAMPLES[4:8], {"shard": 1})
    (features / MANIFEST_NAME).unlink()
    shutil.copy(other / "shard-00001.safetensors", features)
    with pytest.raises(
        MismatchError,
        match=r"shard-00001.safetensors was made for a plan with sha256 \w{64}, and this run's "
        r"plan has \w{64}",
    ):
        FeatureWriter.open(features, invent_plan(LAYOUT), vocabulary()).__enter__()


def test_a_shard_of_other_features_in_a_finished_directory(features: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with FeatureWriter.open(other, invent_plan(LAYOUT), vocabulary()) as writer:
        writer.write_shard(1, SAMPLES[4:8], {"shard": 9})
    shutil.copy(other / "shard-00001.safetensors", features)
    with pytest.raises(
        ArtifactError,
        match=r"shard-00001.safetensors is damaged: its head has sha256 \w{64} and should have",
    ):
        FeatureStore.open(features).verify()


def test_directories_that_hold_something_else(tmp_path: Path) -> None:
    with open_stage(tmp_path / "corpus", Plan(kind="corpus", settings={})) as stage:
        stage.finish(counts={}, files=[])
    with pytest.raises(
        MismatchError, match=r"holds corpus, not features; give a directory that `fledge capture`"
    ):
        FeatureStore.open(tmp_path / "corpus")
    with pytest.raises(ArtifactError, match=r"there is no directory .*nowhere"):
        FeatureStore.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"'ftp://x/y' has an unknown scheme; use a local path"):
        FeatureStore.open("ftp://x/y")
    with pytest.raises(ConfigError, match=r"names the home of nobody here"):
        FeatureStore.open("~nobody-of-that-name/features")


def test_a_layout_that_nobody_knows(tmp_path: Path) -> None:
    for table in ({}, {**LAYOUT.to_json(), "coded": {"taps.codes": ["int3", 4, "features"]}}):
        plan = Plan(kind="features", settings={}, identity={"features": table})
        with pytest.raises(
            ArtifactError, match=r"says in no known way what its features are .*capture again"
        ):
            FeatureWriter.open(tmp_path, plan, vocabulary()).__enter__()


def test_a_damaged_index(features: Path) -> None:
    content = (features / INDEX_NAME).read_bytes()
    with pytest.raises(ArtifactError, match="index.x is of no known kind .*capture again: shards"):
        FeatureIndex.decode(b"\xff" * len(content), "index.x")
    flipped = bytearray(content)
    flipped[-3] ^= 4
    (features / INDEX_NAME).write_bytes(flipped)
    with pytest.raises(ArtifactError, match=rf"{INDEX_NAME} is damaged: .*sha256"):
        FeatureStore.open(features)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("vocab_map", "capture again: only these are made anew"),
        ("channels", "was coded with it: capture into a new directory"),
    ],
)
def test_a_damaged_file_beside_the_shards(features: Path, name: str, remedy: str) -> None:
    path = features / f"{name}.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    store = FeatureStore.open(features)
    message = (
        rf"{path.name} is damaged: it has sha256 \w{{64}} and should have \w{{64}}\. .*{remedy}"
    )
    with pytest.raises(ArtifactError, match=message):
        getattr(store, name)
    with pytest.raises(ArtifactError, match=message):
        store.verify()


def test_the_manifest_covers_the_heads(features: Path) -> None:
    files = json.loads((features / MANIFEST_NAME).read_bytes())["files"]
    assert re.fullmatch(r"\w{64}", files["shard-00000.safetensors"]["sha256"])
    assert set(files) == {path.name for path in features.glob("*.safetensors")}


def test_a_full_disk_is_an_error_in_words_and_loses_nothing(tmp_path: Path) -> None:
    samples = sorted(SAMPLES[:8], key=lambda sample: len(sample.token_ids))
    whole, out = tmp_path / "whole", tmp_path / "out"
    write_features(whole, LAYOUT, samples)
    small, large = (path.stat().st_size for path in sorted(whole.glob("shard-*")))
    assert small < large
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, num_made in ((300, 0), (small - 1, 0), (small, 1), (large - 1, 1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(CapacityError, match=r"(?i)free some space and run"):
                write_features(out, LAYOUT, samples)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(list(out.glob("shard-*"))) == num_made
        assert not list(out.glob(".*.tmp")), "what is half made is removed"
    write_features(out, LAYOUT, samples)
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
