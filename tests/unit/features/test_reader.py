"""Batches for any trainer: the right rows in a reproducible order, in bounded memory."""

import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.features.capture_layout import final_codec, taps_codec
from fledge.features.feature_store import FeatureStore
from fledge.features.host_batch import host_bytes, load_batch
from fledge.features.label_rows import label_rows
from fledge.features.read_ahead import read_ahead
from fledge.features.reader import FeatureReader, read_batches
from fledge.ops.micro_batch import MicroBatch
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from tests.unit.features.invented_features import (
    invent_channels,
    invent_layout,
    invent_samples,
    write_features,
)

LAYOUT = invent_layout()
SAMPLES = invent_samples(LAYOUT, 30)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return write_features(tmp_path_factory.mktemp("features"), LAYOUT, SAMPLES)


def coded(sample: EncodedSample, prefix: str, names: Iterator[str], dtype: torch.dtype):
    arrays = {name: torch.from_numpy(sample.rows[f"{prefix}.{name}"].copy()) for name in names}
    if "values" in arrays:
        arrays["values"] = arrays["values"].view(dtype)
    return arrays


def assert_holds(
    batch: MicroBatch, samples: dict[int, EncodedSample], layout: FeatureLayout
) -> None:
    """Each document of a batch against its sample, decoded alone."""
    taps, final = taps_codec(layout, invent_channels(layout)), final_codec(layout)
    dtype = getattr(torch, layout.dtype)
    label = 0
    starts = batch.documents.starts
    for start, stop, number in zip(starts[:-1], starts[1:], batch.sample_numbers, strict=True):
        sample = samples[number]
        assert batch.token_ids_T[start:stop].tolist() == sample.token_ids.tolist()
        assert batch.loss_mask_T[start:stop].tolist() == sample.loss_mask.tolist()
        features = taps.decode(coded(sample, "taps", iter(taps.parts), dtype), torch.float32)
        torch.testing.assert_close(batch.features_TF[start : stop - 2], features)
        assert not batch.features_TF[stop - 2 : stop].any()
        rows = label_rows(sample.loss_mask)
        here = slice(label, label + len(rows))
        assert batch.targets.rows_R[here].tolist() == (rows + start).tolist()
        assert batch.targets.greedy_R[here].tolist() == sample.rows["greedy"].tolist()
        assert batch.targets.log_mass_R[here].tolist() == sample.rows["log_mass"].tolist()
        if final is not None:
            expected = final.decode(coded(sample, "final", iter(final.parts), dtype), torch.float32)
            torch.testing.assert_close(batch.targets.final_RD[here], expected)
        else:
            assert batch.targets.top_ids_RC[here].tolist() == sample.rows["top.ids"].tolist()
            logprobs = torch.from_numpy(sample.rows["top.logprobs"]).half().float()
            assert torch.equal(batch.targets.top_logprobs_RC[here], logprobs)
        label += len(rows)
    assert label == len(batch.targets.rows_R)


@pytest.mark.parametrize(
    ("form", "target", "dtype"),
    [
        ("exact", "hidden", torch.bfloat16),
        ("exact", "topk", torch.float32),
        ("q5", "hidden", torch.float32),
        ("q4", "topk", torch.bfloat16),
    ],
)
def test_batches_hold_what_was_written(
    tmp_path: Path, form: str, target: str, dtype: torch.dtype
) -> None:
    layout = invent_layout(form, target, dtype)
    samples = invent_samples(layout, 12)
    store = write_features(tmp_path, layout, samples)
    by_number = {sample.number: sample for sample in samples}
    seen = []
    for batch in FeatureReader(store, batch_tokens=64, seed=3):
        assert batch.documents.num_tokens <= 64
        assert batch.features_TF.dtype is torch.float32
        assert (batch.targets.final_RD is None) == (target == "topk")
        assert_holds(batch, by_number, layout)
        seen += batch.sample_numbers
    assert sorted(seen) == sorted(by_number)
    assert seen != sorted(seen)
    reader = FeatureReader(tmp_path, batch_tokens=64, dtype=torch.bfloat16)
    assert next(iter(reader)).features_TF.dtype is torch.bfloat16


def numbers(reader: FeatureReader) -> list[tuple[int, ...]]:
    return [batch.sample_numbers for batch in reader]


def test_the_order_is_a_function_of_seed_and_epoch(store: FeatureStore) -> None:
    orders = {
        (seed, epoch, threads): numbers(
            FeatureReader(store, batch_tokens=80, seed=seed, epoch=epoch, prefetch=threads)
        )
        for seed in (0, 1)
        for epoch in (0, 1)
        for threads in (1, 3)
    }
    for seed, epoch, _ in orders:
        assert orders[seed, epoch, 1] == orders[seed, epoch, 3]
    assert len({str(order) for order in orders.values()}) == 4
    plain = FeatureReader(store, batch_tokens=80, shuffle=False)
    flat = [number for batch in plain for number in batch.sample_numbers]
    assert flat == [sample.number for sample in SAMPLES]
    assert numbers(plain) == numbers(plain)
    assert len(plain) == len(numbers(plain))


def test_processes_share_an_epoch(store: FeatureStore) -> None:
    parts = [
        numbers(FeatureReader(store, batch_tokens=80, rank=rank, world_size=3)) for rank in range(3)
    ]
    assert len({len(part) for part in parts}) == 1
    flat = [number for part in parts for batch in part for number in batch]
    assert len(flat) == len(set(flat)) > 20


def test_settings_that_cannot_be(store: FeatureStore) -> None:
    longest = int(store.lengths.max())
    with pytest.raises(
        ConfigError,
        match=rf"batch_tokens is {longest - 1}, and sample \d+ of .* has {longest} tokens; use at "
        rf"least {longest}",
    ):
        FeatureReader(store, batch_tokens=longest - 1)
    with pytest.raises(ConfigError, match="prefetch is 0; it must be at least 1"):
        FeatureReader(store, batch_tokens=80, prefetch=0)
    with pytest.raises(ConfigError, match="rank is 2; it must be between 0 and 1"):
        FeatureReader(store, batch_tokens=80, rank=2, world_size=2)
    with pytest.raises(
        ConfigError, match=r"max_bytes is 1000, and the largest batch takes \d+ bytes; raise it"
    ):
        iter(FeatureReader(store, batch_tokens=80, max_bytes=1000))


def test_damage_comes_out_where_its_batch_is_due(tmp_path: Path) -> None:
    store = write_features(tmp_path, LAYOUT, SAMPLES)
    shard = tmp_path / "shard-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[int(store.index.starts[9]) + 3] ^= 16
    shard.write_bytes(content)
    places = [[0, 1], [2, 3], [9, 4], [5]]
    batches = read_batches(
        store, places, device=torch.device("cpu"), dtype=torch.float32, threads=3
    )
    assert [next(batches).sample_numbers for _ in range(2)] == [(0, 3), (6, 9)]
    with pytest.raises(ArtifactError, match=r"shard-00002.safetensors is damaged: sample 27 "):
        next(batches)


def test_a_loop_that_is_left_ends_its_threads(store: FeatureStore) -> None:
    before = set(threading.enumerate())
    whole = FeatureReader(store, batch_tokens=80)
    room = max(host_bytes(store, places) for places in whole.places)
    batches = iter(FeatureReader(store, batch_tokens=80, prefetch=3, max_bytes=room))
    next(batches)
    ours = set(threading.enumerate()) - before
    assert len(ours) == 3
    del batches
    gc.collect()
    assert not any(thread.is_alive() for thread in ours)


def test_a_batch_takes_no_more_than_is_said(store: FeatureStore) -> None:
    places = list(range(30))
    batch = load_batch(store, places, is_pinned=False)
    held = sum(tensor.nbytes for tensor in batch.tensors.values())
    assert held + int(store.index.sizes.max()) == host_bytes(store, places)


def test_threads_hold_no_more_than_they_may() -> None:
    """Real memory: what is loaded is counted by the interpreter while nobody takes it."""
    size, count, room = 1 << 20, 40, 5 << 20
    most = 0

    def load(number: int) -> bytearray:
        return bytearray(size + number)

    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        costs = [size + number for number in range(count)]
        loaded = read_ahead(load, range(count), costs, threads=4, max_bytes=room)
        for number, one in enumerate(loaded):
            assert len(one) == costs[number]
            time.sleep(0.005)
            most = max(most, tracemalloc.get_traced_memory()[0] - base)
            del one
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert 3 << 20 < most <= peak < room + (64 << 10)


MEASURE = """
import sys, time, torch
from pathlib import Path
from fledge.features.reader import FeatureReader
from fledge.features.feature_store import FeatureStore

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

store = FeatureStore.open(sys.argv[1])
for batch in FeatureReader(store, batch_tokens=512, max_bytes=8 << 20):
    pass  # everything that is made once is there
limit = time.monotonic() + 60
for room in (64 << 20, 16 << 20):
    reader = FeatureReader(store, batch_tokens=512, prefetch=4, max_bytes=room)
    batch = None
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    batches = iter(reader)
    began, batch = time.monotonic(), next(batches)
    if room == 64 << 20:
        while memory("VmRSS") - before < 36 << 20 and time.monotonic() < limit:
            time.sleep(0.01)
        patience = time.monotonic() - began
    else:
        time.sleep(patience)
    for batch in batches:
        pass
    print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_reader_stays_within_its_memory(tmp_path: Path) -> None:
    """As the kernel counts it, over a store six times as large as what may be held."""
    layout = invent_layout("exact", hidden_size=512)
    store = write_features(tmp_path, layout, invent_samples(layout, 120, longest=200))
    assert store.index.sizes.sum() > 80 << 20
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        # Memory that is given back goes back to the kernel, so that it can be counted.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    much, little = (int(line) for line in told.stdout.split())
    one_batch = 5 << 20
    assert little < (16 << 20) + 2 * one_batch
    assert much > 36 << 20, "or this test could not fail"
