"""Random corpora for tiny targets, and captures of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.progress import Progress
from fledge.features.capture import capture
from fledge.features.capture_job import CaptureInput, open_input
from fledge.models.resolve import target_name
from fledge.models.target_facts import read_facts
from fledge.store.corpus_shard import Sample, shard_file, write_shard
from fledge.store.manifest import CORPUS, Manifest, Plan
from fledge.store.stage_directory import open_stage
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap

CPU = torch.device("cpu")
VOCAB_SIZE = 262
SMALL = CaptureSettings(pass_tokens=96, shard_tokens=200, layers=(1, 2, 4))
"""Several passes a shard, and several shards."""


def random_samples(lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Random tokens; the first half has no loss, and a few tokens at the end have none either."""
    random = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        loss_mask = random.random(length) < 0.7
        loss_mask[: length // 2] = False
        token_ids = random.integers(6, VOCAB_SIZE, length).astype(np.uint16)
        samples.append(Sample(token_ids, loss_mask, f"row-{number}", "random", 1))
    return samples


def save_corpus(
    directory: Path, target: Path, samples: Sequence[Sample], /, **identity: Any
) -> Path:
    """Write samples as `fledge tokenize` would, in two shards."""
    facts = read_facts(target)
    plan = Plan(
        kind=CORPUS,
        settings={},
        identity={
            "target": target_name(str(target)),
            "tokenizer": facts.tokenizer.identity,
            "vocab_size": facts.vocab_size,
            "eos_token_ids": sorted(facts.eos_token_ids),
            **identity,
        },
    )
    with open_stage(directory, plan) as stage:
        half = (len(samples) + 1) // 2
        paths = []
        for number, part in enumerate((samples[:half], samples[half:])):
            if part:
                paths.append(shard_file(directory, number))
                write_shard(paths[-1], part, dtype="uint16", next_row=0, tally={})
        chosen = np.arange(0, facts.vocab_size, 2)
        VocabMap(chosen, facts.vocab_size).save(directory / VOCAB_MAP_NAME)
        stage.finish(counts={}, files=[*paths, directory / VOCAB_MAP_NAME])
    return directory


def opened(
    corpus: Path,
    target: Path,
    settings: CaptureSettings = SMALL,
    *,
    dtype: torch.dtype = torch.float32,
) -> CaptureInput:
    return open_input(corpus, str(target), settings, dtype=dtype, device=CPU)


def run_capture(
    corpus: Path,
    target: Path,
    out: str | Path,
    settings: CaptureSettings = SMALL,
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Manifest:
    return capture(opened(corpus, target, settings, dtype=dtype), out, progress)
