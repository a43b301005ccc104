"""What `measure_capture.py` captures: a target and a corpus of random tokens; and its disk."""

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fledge.models.attention import ATTENTION_NAME
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample, shard_file, token_dtype, write_shard
from fledge.store.manifest import CORPUS, Plan
from fledge.store.stage_directory import open_stage
from fledge.store.vocab_map import VOCAB_MAP_NAME, VocabMap

_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {**_LLAMA_8B, "max_position_embeddings": 8192},
    "llama-8b-long": {**_LLAMA_8B, "max_position_embeddings": 40960},
    # Layers of Qwen3-30B-A3B, a quarter of them: they are alike, and made within seconds.
    "qwen3-moe-12-layers": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "vocab_size": 300,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 8192,
    },
}


def load_target(name: str | None, shape: str, device_name: str, dtype_name: str) -> Target:
    """A target by its name, or one of a known shape with random weights, made in memory."""
    device = pick_device(device_name)
    dtype = pick_dtype(dtype_name, device)
    if name is not None:
        return Target.load(resolve_target(name).directory, dtype=dtype, device=device)
    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]})
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return Target(model.eval(), None, None)


def save_samples(directory: Path, num_tokens: int, vocab_size: int, median_len: int) -> Corpus:
    """Random tokens in samples of ordinary lengths, with loss on the last six tenths of each."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.token_ids) for sample in samples) < num_tokens:
        length = int(np.clip(random.lognormal(np.log(median_len), 0.7), 16, 8 * median_len))
        token_ids = random.integers(0, vocab_size, length).astype(token_dtype(vocab_size))
        loss_mask = np.arange(length) >= 0.4 * length
        samples.append(Sample(token_ids, loss_mask, f"row-{len(samples)}", "random", 1))
    with open_stage(directory, Plan(kind=CORPUS, settings={})) as stage:
        paths = [shard_file(directory, 0), directory / VOCAB_MAP_NAME]
        write_shard(paths[0], samples, dtype=token_dtype(vocab_size), next_row=0, tally={})
        VocabMap(np.arange(min(32000, vocab_size)), vocab_size).save(paths[1])
        stage.finish(counts={}, files=paths)
    return Corpus.open(directory)


def write_plainly(folder: Path, sizes: Sequence[int], num_writers: int) -> float:
    """Seconds that plain files of these sizes take until they are on the disk."""
    folder.mkdir()

    def write(number: int) -> None:
        content = np.full(sizes[number], 7, np.uint8)
        with (folder / str(number)).open("wb") as file:
            file.write(content.data)
            file.flush()
            # As shards are: on the disk, not only in its cache.
            os.fsync(file.fileno())

    with ThreadPoolExecutor(num_writers) as pool:
        started = time.perf_counter()
        list(pool.map(write, range(len(sizes))))
        seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds
