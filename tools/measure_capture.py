"""Tokens per second of a capture over the bare forward pass of the same target, same run.

    python tools/measure_capture.py --target DIRECTORY --out benchmarks/FILE.json
    python tools/measure_capture.py --shape llama-8b --tokens 131072 --out benchmarks/FILE.json

Random samples are read again and again, all ways in turn, by passes of the same samples:

    transformers   hidden states only, by transformers' own layers, nothing kept
    decoder        the same by the layers that a capture runs
    logits         hidden states and the logits of every token, nothing kept
    FORMAT coded   a capture that ends on the host: taps, coding, copies, no files
    FORMAT         a whole capture, until the last file is on the disk

Beside it: bytes a second of writing shards that are in memory, and of plain files of their sizes.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture_subjects import SHAPES, load_target, save_samples, write_plainly

from fledge.contracts import provenance
from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.feature_formats import FORMATS
from fledge.contracts.progress import SilentProgress
from fledge.features.capture import make_shards
from fledge.features.capture_layout import make_layout
from fledge.features.capture_order import ShardPlan, order_shards
from fledge.features.capture_pass import PassRunner
from fledge.features.capture_plan import TargetSizes
from fledge.features.channel_spread import measure_channels
from fledge.features.feature_writer import FeatureWriter
from fledge.features.sample_rows import SampleRows, count_rows
from fledge.features.taps import choose_taps
from fledge.models.target import Target
from fledge.models.target_path import choose_target_path
from fledge.ops.documents import Documents, make_documents
from fledge.store.corpus import Corpus
from fledge.store.feature_layout import EncodedSample, FeatureLayout
from fledge.store.manifest import FEATURES, Plan

LOGITS_AT_ONCE = 1 << 28
WRITERS = 4


@dataclass(frozen=True)
class Bench:
    """One target and one corpus, read in every way."""

    target: Target
    corpus: Corpus
    rows: SampleRows
    settings: CaptureSettings
    taps: tuple[int, ...]
    work: Path

    @property
    def num_tokens(self) -> int:
        """That the target reads."""
        return self.rows.num_tokens - len(self.rows.used)

    def layout(self, settings: CaptureSettings) -> FeatureLayout:
        sizes = TargetSizes(
            hidden_size=self.target.hidden_size,
            intermediate_size=self.target.config.intermediate_size,
            vocab_size=self.target.vocab_size,
            draft_vocab_size=len(self.corpus.vocab_map),
            itemsize=self.target.dtype.itemsize,
            num_parameters=0,
            num_active_parameters=0,
        )
        return make_layout(settings, self.taps, sizes, self.target.dtype)

    def shards(self, layout: FeatureLayout) -> tuple[ShardPlan, ...]:
        return order_shards(
            self.rows,
            layout,
            pass_tokens=self.settings.pass_tokens,
            shard_tokens=self.settings.shard_tokens,
        )

    def runner(self, layout: FeatureLayout) -> PassRunner:
        channels = None
        if layout.features != "exact":
            max_tokens = self.settings.pass_tokens
            channels = measure_channels(
                self.corpus, self.rows, self.target, self.taps, max_tokens=max_tokens
            )
        return PassRunner(self.target, layout, channels, self.corpus.vocab_map)

    def passes(self) -> list[tuple[torch.Tensor, Documents]]:
        made = []
        for shard in self.shards(self.layout(self.settings)):
            for numbers in shard.passes:
                lengths = [int(self.rows.kept[number]) - 1 for number in numbers]
                ids = [self.corpus[n].token_ids[: self.rows.kept[n] - 1] for n in numbers]
                joined = torch.from_numpy(np.concatenate(ids).astype(np.int64))
                documents = make_documents(lengths, self.target.device)
                made.append((joined.to(self.target.device), documents))
        return made

    def stored_bytes(self, layout: FeatureLayout) -> int:
        rows = self.rows
        counts = {
            "tokens": rows.num_tokens,
            "features": rows.num_features,
            "labels": rows.num_labels,
        }
        return sum(count * layout.bytes_per(name) for name, count in counts.items())

    def wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    @torch.no_grad()
    def read(self, passes: Sequence[tuple[torch.Tensor, Documents]], *, has_logits: bool) -> float:
        readout = self.target.readout
        at_once = max(1, LOGITS_AT_ONCE // self.target.vocab_size)
        self.wait()
        started = time.perf_counter()
        for token_ids_T, documents in passes:
            final_TD = self.target.read(token_ids_T, documents).final_TD
            if has_logits:
                for part_PD in torch.split(final_TD, at_once):
                    readout.logits(part_PD)
        self.wait()
        return time.perf_counter() - started

    def read_plainly(self, passes: Sequence[tuple[torch.Tensor, Documents]]) -> float:
        """The same by transformers' layers."""
        with choose_target_path("plain"):
            return self.read(passes, has_logits=False)

    def code(self, layout: FeatureLayout, runner: PassRunner) -> float:
        """Seconds of a capture without files."""
        self.wait()
        started = time.perf_counter()
        running = []
        for shard in self.shards(layout):
            for numbers in shard.passes:
                running.append(runner.start([(n, self.corpus[n]) for n in numbers]))
                if len(running) == 3:
                    running.pop(0).wait()
        for result in running:
            result.wait()
        self.wait()
        return time.perf_counter() - started

    def capture(self, layout: FeatureLayout, runner: PassRunner) -> float:
        """Seconds of a whole capture, all files on the disk."""
        self.wait()
        with self.writer(layout, "capture") as writer:
            started = time.perf_counter()
            with SilentProgress().task("capturing") as task:
                make_shards(self.corpus, runner, writer, self.shards(layout), task)
            seconds = time.perf_counter() - started
        shutil.rmtree(self.work / "capture")
        return seconds

    def writer(self, layout: FeatureLayout, name: str) -> Any:
        identity = {"features": layout.to_json()}
        plan = Plan(kind=FEATURES, settings={}, identity=identity)
        return FeatureWriter.open(self.work / name, plan, self.corpus.vocab_map)


def write_speed(bench: Bench, layout: FeatureLayout, runner: PassRunner) -> dict[str, float]:
    """Bytes a second of shards that are in memory already, and of plain files of their sizes."""
    shards: list[list[EncodedSample]] = []
    for shard in bench.shards(layout)[:8]:
        results = [runner.start([(n, bench.corpus[n]) for n in one]) for one in shard.passes]
        shards.append([sample for result in results for sample in result.samples()])
    with bench.writer(layout, "shards") as writer, ThreadPoolExecutor(WRITERS) as pool:
        started = time.perf_counter()
        sizes = list(pool.map(writer.write_shard, range(len(shards)), shards))
        shard_s = time.perf_counter() - started
    shutil.rmtree(bench.work / "shards")
    plain_s = write_plainly(bench.work / "plain", sizes, WRITERS)
    total = sum(sizes)
    return {
        "bytes": total,
        "shard_bytes_per_s": total / shard_s,
        "plain_bytes_per_s": total / plain_s,
    }


def measure(bench: Bench, formats: Sequence[str], rounds: int) -> dict[str, Any]:
    """All ways in turn; the first round warms up and does not count."""
    passes = bench.passes()
    ways: dict[str, Callable[[], float]] = {
        "transformers": lambda: bench.read_plainly(passes),
        "decoder": lambda: bench.read(passes, has_logits=False),
        "logits": lambda: bench.read(passes, has_logits=True),
    }
    writing: dict[str, Any] = {}
    layouts = {}
    for name in formats:
        layout = bench.layout(replace(bench.settings, features=name))
        runner = bench.runner(layout)
        layouts[name] = layout
        ways[f"{name} coded"] = lambda layout=layout, runner=runner: bench.code(layout, runner)
        ways[name] = lambda layout=layout, runner=runner: bench.capture(layout, runner)
        writing[name] = write_speed(bench, layout, runner)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            found = way()
            if number:
                seconds[name].append(found)
            print(f"round {number}, {name}: {bench.num_tokens / found:,.0f} tokens/s", flush=True)
    speeds = {name: bench.num_tokens / statistics.median(found) for name, found in seconds.items()}
    return {
        "num_tokens": bench.num_tokens,
        "num_labels": bench.rows.num_labels,
        "num_passes": len(passes),
        "tokens_per_s": speeds,
        "of_transformers": {name: found / speeds["transformers"] for name, found in speeds.items()},
        "of_decoder": {name: speed / speeds["decoder"] for name, speed in speeds.items()},
        "of_logits": {name: speed / speeds["logits"] for name, speed in speeds.items()},
        "seconds": seconds,
        "writing": writing,
        "stored_bytes_per_s": {
            name: speeds[name] * bench.stored_bytes(layout) / bench.num_tokens
            for name, layout in layouts.items()
        },
        "target_format": {name: layout.target for name, layout in layouts.items()},
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", help="a directory, or any other name of a target")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=1 << 19)
    parser.add_argument("--median-len", type=int, default=400)
    parser.add_argument("--pass-tokens", type=int, default=CaptureSettings().pass_tokens)
    parser.add_argument("--shard-tokens", type=int, default=CaptureSettings().shard_tokens)
    parser.add_argument("--target-format", default="auto", choices=["auto", "hidden", "topk"])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where files are written")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    target = load_target(options.target, options.shape, options.device, options.dtype)
    work = Path(tempfile.mkdtemp(prefix="measure-capture-", dir=options.work))
    try:
        folder = work / "corpus"
        corpus = save_samples(folder, options.tokens, target.vocab_size, options.median_len)
        settings = CaptureSettings(
            target=options.target_format,
            pass_tokens=options.pass_tokens,
            shard_tokens=options.shard_tokens,
        )
        taps = choose_taps(target.config, "default")
        bench = Bench(target, corpus, count_rows(corpus), settings, taps, work)
        figures = measure(bench, options.formats.split(","), options.rounds)
    finally:
        shutil.rmtree(work)
    is_cuda = target.device.type == "cuda"
    document = {
        "provenance": provenance.collect(
            device=torch.cuda.get_device_name() if is_cuda else "cpu", commit=options.commit
        ),
        "target": Path(options.target).name if options.target else f"{options.shape}, random",
        "dtype": str(target.dtype).removeprefix("torch."),
        "taps": list(taps),
        "pass_tokens": options.pass_tokens,
        "shard_tokens": options.shard_tokens,
        "max_memory_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        **figures,
    }
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
