"""Measures writing and reading features on a local disk, in MB/s of stored bytes.

Samples of invented codes, as long as chats usually are, with two shapes of target: that of
SmolLM2-135M and that of Llama-3.1-8B. Written: whole shards, on the disk when the clock stops.
Read: every sample checked against its checksum; in order and at random; one at a time, and joined
to batches by threads as training does; with the files in the kernel's memory, and after the kernel
was asked to forget them. For comparison: the same files copied and read whole, without any check.
The machine may be busy with other work, so rates are also given per second of CPU time.

    python tools/measure_feature_store.py --dir DIR --out benchmarks/FILE.json [--bytes 1000000000]
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.provenance import collect
from fledge.features.capture_layout import make_layout
from fledge.features.capture_plan import TargetSizes
from fledge.features.feature_store import FeatureStore
from fledge.features.feature_writer import FeatureWriter
from fledge.features.host_batch import host_bytes, load_batch
from fledge.features.read_ahead import read_ahead
from fledge.store.channels import Channels
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.manifest import FEATURES, Plan
from fledge.store.shuffle import shuffled
from fledge.store.vocab_map import choose_vocabulary

SHAPES = {"smollm2-135m": (576, 49152), "llama-3.1-8b": (4096, 128256)}
DRAFT_VOCAB = 32000
SHARD_BYTES = 128 << 20
BATCH_TOKENS = 8192
MEAN_TOKENS = 600
ROUNDS = 3


def layout_of(hidden_size: int, vocab_size: int) -> FeatureLayout:
    sizes = TargetSizes(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=DRAFT_VOCAB,
        itemsize=2,
        num_parameters=1,
        num_active_parameters=1,
    )
    settings = CaptureSettings(target="hidden")
    return make_layout(settings, (2, 16, 29), sizes, torch.bfloat16)


def invent(layout: FeatureLayout, number: int, pool: np.ndarray[Any, Any]) -> EncodedSample:
    """A sample whose arrays are cut from a pool of random bytes."""
    chance = np.random.default_rng(number)
    num_tokens = int(np.clip(chance.lognormal(np.log(MEAN_TOKENS), 0.6), 20, 4096))
    mask = np.arange(num_tokens) >= num_tokens // 4
    counts = {"features": num_tokens - 2, "labels": int(mask[2:].sum())}
    rows = {}
    for name, part in layout.parts.items():
        if part.counted == "tokens":
            continue
        size = counts[part.counted] * part.row_bytes
        start = int(chance.integers(0, len(pool) - size) // 8 * 8)
        flat = pool[start : start + size].view(part.numpy_dtype)
        rows[name] = flat.reshape(part.shape(counts[part.counted]))
    token_ids = chance.integers(0, layout.vocab_size, num_tokens)
    return EncodedSample(number, number, token_ids, mask, rows)


def write(directory: Path, layout: FeatureLayout, total: int) -> dict[str, int]:
    """Bytes written, and how fast, invention of samples not counted."""
    pool = np.random.default_rng(0).integers(0, 256, 96 << 20, np.uint8)
    plan = Plan(kind=FEATURES, settings={}, identity={"features": layout.to_json()})
    vocab_map = choose_vocabulary(np.ones(layout.vocab_size, np.int64), DRAFT_VOCAB)
    written, number, shard = 0, 0, 0
    wall = cpu = 0.0
    with FeatureWriter.open(directory, plan, vocab_map) as writer:
        width = layout.row_width
        writer.channels = Channels(np.zeros(width, np.float32), np.ones(width, np.float32))
        while written < total:
            samples, size = [], 0
            while size < SHARD_BYTES:
                samples.append(invent(layout, number, pool))
                size += sum(array.nbytes for array in samples[-1].rows.values())
                number += 1
            wall, cpu = wall - time.perf_counter(), cpu - time.process_time()
            written += writer.write_shard(shard, samples)
            wall, cpu = wall + time.perf_counter(), cpu + time.process_time()
            shard += 1
        writer.finish(counts={}, device="cpu")
    return {
        "stored_bytes": written,
        "write_mb_per_s": round(written / wall / 1e6),
        "write_mb_per_cpu_s": round(written / cpu / 1e6),
    }


def forget(directory: Path) -> None:
    """Ask the kernel to drop the files from its memory."""
    for path in directory.glob("shard-*"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def rate(work: Callable[[], None], num_bytes: int, before: Callable[[], None]) -> dict[str, Any]:
    """MB per second of the clock and of this process's CPU: the best of a few rounds, and all."""
    found = []
    for _ in range(ROUNDS):
        before()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        found.append((num_bytes / wall / 1e6, num_bytes / cpu / 1e6))
    walls, cpus = ([round(one) for one in rates] for rates in zip(*found, strict=True))
    return {"mb_per_s": max(walls), "rounds": walls, "mb_per_cpu_s": max(cpus)}


def read_files(directory: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in sorted(directory.glob("shard-*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_samples(store: FeatureStore, order: list[int]) -> None:
    for place in order:
        store.read(place)


def batches_of(store: FeatureStore, order: list[int]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    room = BATCH_TOKENS
    for place in order:
        length = int(store.lengths[place])
        if length > room:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(place)
        room -= length
    return batches


def read_batches(store: FeatureStore, order: list[int], threads: int) -> None:
    batches = batches_of(store, order)
    costs = [host_bytes(store, batch) for batch in batches]
    loaded = read_ahead(
        lambda batch: load_batch(store, batch, is_pinned=False),
        batches,
        costs,
        threads=threads,
        max_bytes=4 * max(costs),
    )
    for _ in loaded:
        pass


def measure_reading(directory: Path) -> dict[str, Any]:
    store = FeatureStore.open(directory)
    num_bytes = int(store.index.sizes.sum())
    ordered = list(range(len(store)))
    mixed = [int(place) for place in shuffled(len(store), 0, 0)]
    works: dict[str, Callable[[], None]] = {
        "whole files, unchecked": lambda: read_files(directory),
        "samples in order": lambda: read_samples(store, ordered),
        "samples at random": lambda: read_samples(store, mixed),
        "batches at random, 1 thread": lambda: read_batches(store, mixed, 1),
        "batches at random, 2 threads": lambda: read_batches(store, mixed, 2),
    }
    found: dict[str, Any] = {}
    for name, work in works.items():
        work()
        found[name] = {
            "from memory": rate(work, num_bytes, lambda: None),
            "from disk": rate(work, num_bytes, lambda: forget(directory)),
        }
        print(f"{directory.name}: {name}: {json.dumps(found[name])}", file=sys.stderr)
    return {"samples": len(store), "tokens": int(store.lengths.sum()), "read": found}


def copy_rate(directory: Path) -> int:
    """MB/s of a plain copy of one shard, flushed."""
    source, copy = directory / "shard-00000.safetensors", directory.parent / "copy"
    start = time.perf_counter()
    shutil.copyfile(source, copy)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    copy.unlink()
    return round(source.stat().st_size / seconds / 1e6)


def settle_memory(total: int) -> None:
    """Virtual machines get memory when it is first used, which takes longer than to write it."""
    block = np.ones(total, np.uint8)
    del block


def measure(directory: Path, layout: FeatureLayout, total: int) -> dict[str, Any]:
    result = {
        **write(directory, layout, total),
        "bytes_per_feature_row": layout.bytes_per("features"),
        "bytes_per_label_row": layout.bytes_per("labels"),
        "plain_copy_mb_per_s": copy_rate(directory),
    }
    print(f"{directory.name}: {json.dumps(result)}", file=sys.stderr)
    return result | measure_reading(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"cores": os.cpu_count(), "load_at_start": round(os.getloadavg()[0], 2)}
    settle_memory(2 * options.bytes)
    results = {}
    for name, (hidden_size, vocab_size) in SHAPES.items():
        directory = options.dir / name
        results[name] = measure(directory, layout_of(hidden_size, vocab_size), options.bytes)
        shutil.rmtree(directory)
    report = {
        "machine": machine,
        "what": "writing and reading features, MB/s of stored bytes, checksums verified",
        "settings": {
            "shard_bytes": SHARD_BYTES,
            "batch_tokens": BATCH_TOKENS,
            "median_sample_tokens": MEAN_TOKENS,
            "rounds": ROUNDS,
        },
        "shapes": results,
        "provenance": collect(device="cpu"),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
