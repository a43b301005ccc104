"""Channels: robust against the few tokens with enormous values, kept with the features.

Catches a spread that one token decides, a channel that is divided by zero, features that are
decoded with channels they were not coded with, and a damaged file that is taken for a good one.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from fledge.contracts.errors import ArtifactError
from fledge.features.channel_spread import MAX_ROWS, channels_of, spread_out
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.features.sample_rows import SampleRows
from fledge.store.channels import CHANNELS_NAME, Channels
from tests.unit.features.invented_features import (
    invent_layout,
    invent_plan,
    invent_samples,
    vocabulary,
    write_features,
)

LAYOUT = invent_layout("q5")
SAMPLES = invent_samples(LAYOUT, 4)


def test_center_and_spread_of_a_gaussian() -> None:
    chance = torch.Generator().manual_seed(0)
    sizes, middles = torch.tensor([0.01, 1, 100, 5000]), torch.tensor([1.0, -3, 0, 20000])
    rows = torch.randn(20_000, 4, generator=chance) * sizes + middles
    rows[::50] *= 1000
    rows[3, 1] = torch.inf
    found = channels_of(rows.bfloat16().float())
    assert len(found) == 4
    np.testing.assert_allclose(found.spread, sizes, rtol=0.1)
    assert np.all(np.abs(found.center - middles.numpy()) < 0.2 * sizes.numpy())


def test_channels_that_hardly_move() -> None:
    rows = torch.zeros(100, 3)
    rows[:, 1] = 7
    rows[5, 2] = 40
    found = channels_of(rows)
    assert found.center.tolist() == [0, 7, 0]
    assert found.spread.tolist() == [1, 1, 40]


def test_rows_that_overflowed_everywhere_are_left_to_the_pass_that_refuses_them() -> None:
    found = channels_of(torch.full((4, 2), torch.nan))
    assert found.center.tolist() == [0, 0]
    assert found.spread.tolist() == [1, 1]


def test_samples_come_from_the_whole_corpus() -> None:
    kept = np.tile(np.array([0, 11, 21]), 200)
    rows = SampleRows(kept, np.minimum(kept, 3))
    numbers = spread_out(rows, MAX_ROWS)
    assert numbers == sorted(set(numbers))
    assert all(kept[number] for number in numbers)
    assert numbers[0] == 1
    assert numbers[-1] > 500
    assert 0.8 * MAX_ROWS < (kept[numbers] - 1).sum() <= MAX_ROWS
    assert spread_out(rows, 1) == [1]
    assert spread_out(SampleRows(np.array([5]), np.array([1])), MAX_ROWS) == [0]


def test_they_are_kept_with_the_features(tmp_path: Path) -> None:
    store = write_features(tmp_path / "coded", LAYOUT, SAMPLES)
    assert store.channels is not None
    assert len(store.channels) == LAYOUT.row_width
    assert CHANNELS_NAME in store.manifest.files
    exact = invent_layout("exact")
    store = write_features(tmp_path / "exact", exact, invent_samples(exact, 2))
    assert store.channels is None
    assert CHANNELS_NAME not in store.manifest.files


def test_shards_without_them_are_refused(tmp_path: Path) -> None:
    with FeatureWriter.open(tmp_path, invent_plan(LAYOUT), vocabulary()) as writer:
        writer.write_shard(0, SAMPLES)
        with pytest.raises(
            ArtifactError, match=r"channels.safetensors is gone, and the features beside it"
        ):
            _ = writer.channels


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    write_features(tmp_path, LAYOUT, SAMPLES)
    path = tmp_path / CHANNELS_NAME
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"channels.safetensors is damaged: it has sha256"):
        _ = FeatureStore.open(tmp_path).channels


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"center": np.zeros(4, np.float32)}, r"does not hold the channels of features"),
        (
            {"center": np.zeros(4, np.float32), "spread": np.ones(3, np.float32)},
            r"channels of shapes \(4,\) and \(3,\), and rows of features have 4 values",
        ),
        (
            {"center": np.zeros(4, np.float32), "spread": np.zeros(4, np.float32)},
            r"without a usable spread",
        ),
    ],
)
def test_files_that_cannot_be_channels(
    tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    path = tmp_path / CHANNELS_NAME
    save_file(tensors, path)
    with pytest.raises(ArtifactError, match=message):
        Channels.decode(path.read_bytes(), str(path), 4)
    with pytest.raises(ArtifactError, match=r"does not hold the channels"):
        Channels.decode(b"not safetensors", str(path), 4)
