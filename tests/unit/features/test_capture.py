"""The capture stage: passes and shards, resuming, and everything it refuses."""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.features import capture_job, capture_order, capture_pass
from fledge.features.capture import capture, free_room, require_room
from fledge.features.capture_job import estimate
from fledge.features.capture_order import order_passes, order_shards
from fledge.features.capture_plan import TargetSizes
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.features.label_rows import kept_tokens, label_rows
from fledge.features.sample_rows import SampleRows, count_rows
from fledge.models.parameter_count import count_parameters
from fledge.models.target_loading import load_config
from fledge.store.corpus import Corpus
from fledge.testing import save_tiny_target
from tests.unit.features.capture_support import (
    SMALL,
    opened,
    random_samples,
    run_capture,
    save_corpus,
)
from tests.unit.store.object_servers import SERVERS

LENGTHS = (30, 2, 50, 9, 120, 70, 3, 44, 61, 20, 33, 90)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpora") / "corpus"
    return save_corpus(directory, target, random_samples(LENGTHS))


@pytest.fixture(scope="module")
def unbroken(corpus: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features") / "features"
    run_capture(corpus, target, out)
    return out


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the manifest, which says when and where it was made."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.name not in {"manifest.json", ".lock"}
    }


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_rows_are_counted_as_for_each_sample_alone(corpus: Path) -> None:
    opened_corpus = Corpus.open(corpus)
    rows = count_rows(opened_corpus)
    samples = list(opened_corpus)
    assert rows.kept.tolist() == [kept_tokens(sample.loss_mask) for sample in samples]
    assert rows.labels.tolist() == [len(label_rows(sample.loss_mask)) for sample in samples]
    assert rows.num_features == sum(max(kept - 2, 0) for kept in rows.kept.tolist())
    assert rows.used.tolist() == [number for number in range(len(LENGTHS)) if number != 1]


def test_passes_hold_whole_samples_and_shards_whole_passes(
    corpus: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = opened(corpus, target)
    layout = given.layout((1, 2, 4))
    passes = order_passes(given.rows, 96)
    assert [number for numbers in passes for number in numbers] == given.rows.used.tolist()
    lengths = [[int(given.rows.kept[n]) - 1 for n in numbers] for numbers in passes]
    assert all(sum(one) <= 96 or len(one) == 1 for one in lengths)
    # None has room for the first sample of the next.
    assert all(sum(one) + after[0] > 96 for one, after in zip(lengths, lengths[1:], strict=False))
    shards = order_shards(given.rows, layout, pass_tokens=96, shard_tokens=200)
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert [numbers for shard in shards for numbers in shard.passes] == passes
    assert sum(shard.read_tokens for shard in shards) == sum(map(sum, lengths))
    assert sum(shard.num_samples for shard in shards) == len(given.rows.used)
    monkeypatch.setattr(capture_order, "SHARD_BYTES", 1)
    small = order_shards(given.rows, layout, pass_tokens=96, shard_tokens=200)
    assert len(small) == len(passes)
    nothing = SampleRows(np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert order_shards(nothing, layout, pass_tokens=96, shard_tokens=200) == ()


def test_a_finished_directory_describes_itself(corpus: Path, unbroken: Path) -> None:
    store = FeatureStore.open(unbroken)
    manifest = store.manifest
    assert manifest.plan.parents == {"corpus": Corpus.open(corpus).manifest.fingerprint}
    assert manifest.counts["samples"] == len(store) == 11
    assert manifest.counts["samples_without_labels"] == 1
    assert manifest.counts["shards"] == 3
    assert manifest.counts["tokens"] == int(store.lengths.sum())
    assert manifest.plan.identity["target"] == "tiny"
    assert len(manifest.plan.identity["weights"]) == 64
    store.verify()
    kept = Corpus.open(corpus)[2]
    sample = store.read(1)
    assert sample.number == 2
    assert np.array_equal(sample.token_ids, kept.token_ids[: len(sample.token_ids)])
    assert np.array_equal(sample.loss_mask, kept.loss_mask[: len(sample.loss_mask)])
    assert not kept.loss_mask[len(sample.loss_mask) :].any()


def test_missing_shards_are_made_again_with_the_same_bytes(
    corpus: Path, target: Path, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    shutil.copytree(unbroken, out)
    for name in ("manifest.json", "index.safetensors", "shard-00001.safetensors"):
        (out / name).unlink()
    progress = Notes()
    run_capture(corpus, target, out, progress=progress)
    assert "2 of 3 shards were made before." in progress.notes
    assert contents(out) == contents(unbroken)
    # With every shard there, the target is not needed any more.
    (out / "manifest.json").unlink()
    progress = Notes()
    run_capture(corpus, target, out, progress=progress)
    assert progress.notes == ["3 of 3 shards were made before."]
    assert FeatureStore.open(out).manifest.fingerprint == (
        FeatureStore.open(unbroken).manifest.fingerprint
    )


def test_only_one_process_writes_a_directory(corpus: Path, target: Path, tmp_path: Path) -> None:
    given = opened(corpus, target)
    layout = given.layout((1, 2, 4))
    with (
        FeatureWriter.open(tmp_path / "out", given.plan(layout), given.corpus.vocab_map),
        pytest.raises(ArtifactError, match="another fledge process is writing"),
    ):
        run_capture(corpus, target, tmp_path / "out")


def test_a_full_disk_stops_cleanly_and_the_run_goes_on(
    corpus: Path, target: Path, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    sizes = [len(content) for name, content in contents(unbroken).items() if "shard" in name]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1, limits[1]))
    try:
        with pytest.raises(CapacityError, match=r"disk is full or a size limit.*goes on where it"):
            run_capture(corpus, target, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.glob(".shard*"))
    assert len(list(out.glob("shard-*"))) < 3
    run_capture(corpus, target, out)
    assert contents(out) == contents(unbroken)


def test_a_flipped_bit_is_found_and_named(unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "features"
    shutil.copytree(unbroken, out)
    path = out / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-40] ^= 4
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"shard-00001\.safetensors is damaged: sample 10 of"):
        FeatureStore.open(out).verify()


def test_a_corpus_that_was_changed_is_refused(corpus: Path, target: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(corpus, tmp_path / "corpus")
    path = changed / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"shard-00000\.safetensors was changed since it was"):
        run_capture(changed, target, tmp_path / "features")


@pytest.mark.parametrize(
    ("settings", "dtype", "there", "asked"),
    [
        (replace(SMALL, layers=(1, 2)), torch.float32, "layers = [1, 2, 4]", "layers = [1, 2]"),
        (SMALL, torch.bfloat16, "dtype = 'float32'", "dtype = 'bfloat16'"),
        (replace(SMALL, features="q8"), torch.float32, "features = 'q5'", "features = 'q8'"),
        (replace(SMALL, pass_tokens=97), torch.float32, "pass_tokens = 96", "pass_tokens = 97"),
    ],
)
def test_a_directory_of_other_work_is_refused(
    corpus: Path,
    target: Path,
    unbroken: Path,
    settings: CaptureSettings,
    dtype: torch.dtype,
    there: str,
    asked: str,
) -> None:
    with pytest.raises(MismatchError) as refused:
        run_capture(corpus, target, unbroken, settings, dtype=dtype)
    assert there in str(refused.value)
    assert asked in str(refused.value)


def other_weights(target: Path, directory: Path) -> Path:
    """The same target, one number of its weights changed everywhere."""
    shutil.copytree(target, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, path, {"format": "pt"})
    return directory


def other_tokenizer(target: Path, directory: Path) -> Path:
    """The same target, two letters of its tokenizer exchanged."""
    shutil.copytree(target, directory)
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(table))
    return directory


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (other_weights, "tiny", r"identity\.weights = '\w{64}', and this run has identity\.weight"),
        (other_weights, "large", r"identity\.target = 'tiny', and this run has .*'large'"),
        (
            other_tokenizer,
            "tiny",
            r"identity\.tokenizer\.\w+ = '\w+', and this run has identity\.t",
        ),
    ],
)
def test_features_of_another_target_are_refused(
    unbroken: Path,
    target: Path,
    change: Callable[[Path, Path], Path],
    name: str,
    message: str,
    tmp_path: Path,
) -> None:
    other = change(target, tmp_path / name)
    corpus = save_corpus(tmp_path / "corpus", other, random_samples(LENGTHS))
    with pytest.raises(MismatchError, match=message):
        run_capture(corpus, other, unbroken)


def test_features_of_another_corpus_are_refused(
    target: Path, unbroken: Path, tmp_path: Path
) -> None:
    other = save_corpus(tmp_path / "corpus", target, random_samples(LENGTHS, seed=1))
    with pytest.raises(MismatchError, match=r"parents\.corpus = '\w{64}', and this run has par"):
        run_capture(other, target, unbroken)


def test_a_corpus_of_another_target_is_refused(corpus: Path, target: Path, tmp_path: Path) -> None:
    renamed = shutil.copytree(target, tmp_path / "large")
    with pytest.raises(MismatchError, match=r"with target = 'tiny', and this one has .* 'large'"):
        opened(corpus, renamed)
    other = other_tokenizer(target, tmp_path / "tiny")
    with pytest.raises(MismatchError, match=r"for tiny with tokenizer \w{12}, and tiny has token"):
        opened(corpus, other)
    wide = save_corpus(tmp_path / "corpus", target, random_samples([20]), vocab_size=999)
    with pytest.raises(MismatchError, match=r"vocab_size = 999, and this one has vocab_size = 262"):
        opened(wide, target)


def test_samples_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    silent = save_corpus(tmp_path / "silent", target, random_samples([2, 1]))
    with pytest.raises(ArtifactError, match="none of the 2 samples of .* has a token with loss"):
        opened(silent, target)
    long = save_corpus(tmp_path / "long", target, random_samples([20, 600]))
    with pytest.raises(MismatchError, match=r"sample 1 .* has 59\d tokens to read, and tiny reads"):
        opened(long, target)


def test_layers_that_the_target_lacks_are_refused(corpus: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match="names 5, and the target has 4 layers"):
        opened(corpus, target, replace(SMALL, layers=(1, 5)))


def test_infinity_is_named_by_sample(corpus: Path, target: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(target, tmp_path / "tiny")
    path = broken / "model.safetensors"
    tensors = load_file(path)
    samples = list(Corpus.open(corpus))
    # Above the ids that the target is tried with before it is trusted.
    token = next(int(token_id) for token_id in samples[8].token_ids if token_id > 150)
    guilty = next(
        number
        for number, sample in enumerate(samples)
        if token in sample.token_ids[: kept_tokens(sample.loss_mask)][:-1]
    )
    tensors["model.embed_tokens.weight"][token] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    message = rf"of sample {guilty} of the corpus \(row row-{guilty}\) hold infinity or NaN"
    with pytest.raises(ArtifactError, match=message):
        run_capture(corpus, broken, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_disk_that_is_too_small(
    corpus: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = capture_job.estimate
    monkeypatch.setattr(
        "fledge.features.capture.estimate",
        lambda given: replace(real(given), needed_bytes=1 << 60),
    )
    with pytest.raises(CapacityError, match=r"for the features in .*about 1152921\.5 TB needed"):
        run_capture(corpus, target, tmp_path / "out")
    require_room("s3://bucket/features", 1 << 60)
    assert free_room("s3://bucket/features") is None


def test_the_estimate_is_what_is_written(corpus: Path, target: Path, unbroken: Path) -> None:
    given = opened(corpus, target)
    planned = estimate(given)
    files = FeatureStore.open(unbroken).manifest.files
    payload = sum(int(size) for size in FeatureStore.open(unbroken).index.sizes)
    # Samples begin at multiples of 16 bytes.
    assert planned.total_bytes <= payload <= planned.total_bytes + 16 * 11
    assert planned.num_shards == sum(name.startswith("shard") for name in files) == 3
    auto = opened(corpus, target, replace(SMALL, layers="auto"))
    assert estimate(auto).total_bytes == planned.total_bytes


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3-moe", "deepseek-v3-moe"])
def test_parameters_are_counted_from_the_config(architecture: str, tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "target", architecture)
    tensors = load_file(directory / "model.safetensors")
    sizes = {name: t.numel() for name, t in tensors.items() if "correction_bias" not in name}
    stored, embedding = sum(sizes.values()), sizes["model.embed_tokens.weight"]
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    count = count_parameters(load_config(directory))
    assert count.total == stored
    unused = 0 if architecture == "llama-tied" else embedding
    # Both mixtures send a token to 2 of 4 experts.
    assert count.active == stored - unused - experts // 2


def test_sizes_of_the_target(corpus: Path, target: Path) -> None:
    sizes: TargetSizes = opened(corpus, target).sizes
    assert (sizes.hidden_size, sizes.intermediate_size) == (32, 48)
    assert (sizes.vocab_size, sizes.draft_vocab_size, sizes.itemsize) == (262, 131, 4)


def test_out_of_memory_says_what_to_lower(
    corpus: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("fledge.features.capture_pass.describe_rows", fail)
    with pytest.raises(CapacityError, match=r"over a pass of \d+ tokens; lower capture.pass_tok"):
        capture(opened(corpus, target), tmp_path / "out")


def test_large_token_ids_keep_their_bits() -> None:
    ids = torch.tensor([0, 32767, 32768, 65535])
    assert capture_pass._to_numpy(capture_pass._narrowed(ids, 65536)).tolist() == ids.tolist()
    wide = torch.tensor([70000, 128255])
    assert capture_pass._to_numpy(capture_pass._narrowed(wide, 128256)).tolist() == wide.tolist()


@pytest.mark.parametrize("kind", ["s3"])
def test_object_stores_that_fail_now_and_then_get_the_same_bytes(
    kind: str, corpus: Path, target: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SERVERS[kind]() as cloud:
        for name, value in cloud.environment.items():
            monkeypatch.setenv(name, value)
        cloud.gateway.share = 0.4
        address = f"{cloud.root}/features"
        manifest = run_capture(corpus, target, address)
        assert {fault for _, _, fault in cloud.gateway.seen} > {""}
        assert manifest.files == FeatureStore.open(unbroken).manifest.files
        FeatureStore.open(address).verify()
        with pytest.raises(MismatchError, match=r"pass_tokens = 96, and this run has .* = 97"):
            run_capture(corpus, target, address, replace(SMALL, pass_tokens=97))
