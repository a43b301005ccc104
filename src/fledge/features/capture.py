"""The stage behind `fledge capture`: a corpus and a target in, features out.

The device never waits for files: passes are started ahead of what it works on, and whole shards are
cut into samples, checked and written by threads meanwhile. A shard is a fixed set of passes, so
that a killed run goes on with the shards that are missing and ends with the same bytes.
"""

import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from fledge.contracts.progress import Progress, SilentProgress, Task
from fledge.features.capture_job import CaptureInput, estimate
from fledge.features.capture_order import ShardPlan
from fledge.features.capture_pass import PassResult, PassRunner
from fledge.features.channel_spread import measure_channels
from fledge.features.feature_writer import FeatureWriter
from fledge.features.tap_choice import settle_taps
from fledge.models.checked_target import load_checked_target
from fledge.models.target import Target
from fledge.store.capacity import free_bytes, require_disk
from fledge.store.channels import Channels
from fledge.store.corpus import Corpus
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import Manifest
from fledge.store.places import open_place

_PASSES_AHEAD = 3
"""Passes that the device has before it, so that it never runs dry."""

_HANDOVER_S = 0.0005
_WRITERS = 4
_SHARDS_AHEAD = 5
"""Shards that are being written or wait for it: what the host's memory has to hold."""


def capture(given: CaptureInput, out: str | Path, progress: Progress | None = None) -> Manifest:
    """Make the features; goes on where an earlier run of the same capture stopped."""
    shown = progress or SilentProgress()
    load = cache(lambda: load_target(given, shown))

    def load_if_room() -> Target:
        require_room(out, estimate(given).needed_bytes)
        return load()

    layout = given.layout(settle_taps(given, out, load_if_room, shown))
    with FeatureWriter.open(out, given.plan(layout), given.corpus.vocab_map) as writer:
        if not writer.is_finished:
            shards = given.shards(layout)
            missing = [shard for shard in shards if shard.number not in writer.finished]
            if len(missing) < len(shards):
                num_made = len(shards) - len(missing)
                shown.note(f"{num_made:,} of {len(shards):,} shards were made before.")
            # Before the weights are loaded: a disk that is too small is known already.
            require_room(out, estimate(given).needed_bytes * len(missing) // len(shards))
            if missing:
                # Features say which corpus they are of by its manifest, and nobody can tell later.
                given.corpus.verify(shown)
                channels = settle_channels(given, load(), writer)
                runner = PassRunner(load(), layout, channels, given.corpus.vocab_map)
                num_tokens = sum(shard.read_tokens for shard in missing)
                with shown.task("capturing", num_tokens, "tokens") as task:
                    make_shards(given.corpus, runner, writer, missing, task)
            writer.finish(counts=_counts(given, len(shards)), device=str(given.device))
        return writer.manifest


def settle_channels(given: CaptureInput, target: Target, writer: FeatureWriter) -> Channels | None:
    """The channels that every shard is coded with, measured before the first; None if exact."""
    layout = writer.layout
    if layout.features == "exact" or writer.finished:
        return writer.channels
    writer.channels = measure_channels(
        given.corpus, given.rows, target, layout.taps, max_tokens=given.settings.pass_tokens
    )
    return writer.channels


def load_target(given: CaptureInput, progress: Progress) -> Target:
    return load_checked_target(
        given.target,
        given.directory,
        origin=given.origin,
        dtype=given.dtype,
        device=given.device,
        progress=progress,
    )


def require_room(out: str | Path, needed: int) -> None:
    """Refuse to start when a local disk has less room than needed."""
    place = open_place(out)
    if isinstance(place, LocalPlace):
        require_disk(place.path, needed, "the features", place="output")


def free_room(out: str | Path) -> int | None:
    """Bytes that are free; None in an object store, which does not say."""
    place = open_place(out)
    return free_bytes(place.path) if isinstance(place, LocalPlace) else None


def make_shards(
    corpus: Corpus,
    runner: PassRunner,
    writer: FeatureWriter,
    shards: Sequence[ShardPlan],
    task: Task,
) -> None:
    """Read the samples of the shards and write them."""
    running = deque[PassResult]()
    writing = deque[Future[int]]()
    pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fledge-shards")
    interval_s = sys.getswitchinterval()
    # Whoever feeds the device asks for the interpreter at every operation, and must not wait for
    # the threads that write as long as Python has it by default.
    sys.setswitchinterval(_HANDOVER_S)
    try:
        for shard in shards:
            results: list[PassResult] = []
            for numbers in shard.passes:
                _raise_failure(writing)
                _await_passes(running, _PASSES_AHEAD - 1, task)
                results.append(runner.start([(number, corpus[number]) for number in numbers]))
                running.append(results[-1])
            while len(writing) >= _SHARDS_AHEAD:
                writing.popleft().result()
            writing.append(pool.submit(_write, writer, shard.number, results))
        _await_passes(running, 0, task)
        while writing:
            writing.popleft().result()
    finally:
        # What is being written is finished; what waits is made again by the next run.
        pool.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(interval_s)


def _counts(given: CaptureInput, num_shards: int) -> dict[str, Any]:
    rows = given.rows
    return {
        "samples": len(rows.used),
        "samples_without_labels": len(rows.kept) - len(rows.used),
        "tokens": rows.num_tokens,
        "feature_rows": rows.num_features,
        "label_rows": rows.num_labels,
        "shards": num_shards,
    }


def _write(writer: FeatureWriter, number: int, results: Sequence[PassResult]) -> int:
    samples = [sample for result in results for sample in result.samples()]
    return writer.write_shard(number, samples)


def _await_passes(running: deque[PassResult], num_left: int, task: Task) -> None:
    while len(running) > num_left:
        done = running.popleft()
        done.wait()
        task.advance(done.num_tokens)


def _raise_failure(writing: deque[Future[int]]) -> None:
    while writing and writing[0].done():
        writing.popleft().result()
