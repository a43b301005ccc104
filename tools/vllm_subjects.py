"""What `compare_vllm.py` measures: targets and shapes, and what vLLM is told to run them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_LEN, ANSWER_LEN = 128, 256
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    },
}

_SLACK_TOKENS = 64
"""Drafts and the rest of a page, for every request's place in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A target, the head of a shape, and the chains to try."""

    name: str
    what: str
    chains: tuple[int, ...]
    target: Path
    head: Path | None

    @property
    def vocab_size(self) -> int:
        return int(self._config()["vocab_size"])

    def cache_bytes(self, num_requests: int, answer_len: int) -> int:
        """Keys and values of that many requests at their end, in 16 bits, the head's too."""
        config = self._config()
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        num_layers = config["num_hidden_layers"] + (self.head is not None)
        each = 2 * 2 * num_layers * config.get("num_key_value_heads", heads) * head_dim
        return int(num_requests * (PROMPT_LEN + answer_len + _SLACK_TOKENS) * each)

    def _config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.target / "config.json").read_text("utf-8"))
        return found


def read_subject(words: str, folder: Path, draft_vocab: int) -> Subject:
    """NAME=SHAPE:CHAIN,CHAIN or NAME=DIRECTORY:0."""
    name, _, rest = words.partition("=")
    what, _, chains = rest.rpartition(":")
    if what in SHAPES:
        target, head = write_shape(folder / name, what, draft_vocab)
    else:
        target, head = directory_of(Path(what)), None
    numbers = tuple(int(chain) for chain in chains.split(","))
    if head is None and any(numbers):
        sys.exit(f"{what} has no head: only chain 0 can be measured, not {chains}")
    return Subject(name=name, what=Path(what).name, chains=numbers, target=target, head=head)


def directory_of(target: Path) -> Path:
    """A directory as it is; any other name as fledge understands it, by a process of its own."""
    if target.is_dir():
        return target.absolute()
    source = str(Path(__file__).parents[1] / "src")
    code = "import sys; from fledge.models.resolve import resolve_target as r; "
    command = [sys.executable, "-c", code + "print(r(sys.argv[1]).directory)", str(target)]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"{target} is no directory, and fledge cannot find it here: {reason}")
    return Path(done.stdout.strip().splitlines()[-1])


def write_shape(folder: Path, name: str, draft_vocab: int) -> tuple[Path, Path]:
    """Directories with nothing but the configs of a target and of a head."""
    shape = SHAPES[name]
    target = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    head = {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(draft_vocab, shape["vocab_size"]),
        "target_hidden_size": shape["hidden_size"],
    }
    places = folder / "target", folder / "head"
    for place, config in zip(places, (target, head), strict=True):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return places


def engine_options(
    subject: Subject,
    chain: int,
    sizes: Sequence[int],
    *,
    rate: float,
    answer_len: int,
    is_cpu: bool,
) -> dict[str, Any]:
    """What vLLM's engine for one chain and these batch sizes is told."""
    largest = max(sizes)
    # The target reads chain + 1 tokens of every request, the head's later steps one.
    batches = [batch for batch in BATCHES if batch <= largest]
    passes = sorted({batch * rows for batch in batches for rows in (1, chain + 1)})
    found: dict[str, Any] = {
        "model": str(subject.target),
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": largest,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if subject.what in SHAPES:
        found["load_format"] = "dummy"
    if chain:
        found["speculative_config"] = {
            "method": "eagle3",
            "model": str(subject.head),
            "num_speculative_tokens": chain,
        }
    if is_cpu:  # drafts are checked as usual
        return found | {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    # The size of the cache is told, so that memory is not measured while others take some, and
    # graphs are not captured twice. The share is only what must be free at least.
    found |= {
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": subject.cache_bytes(largest, answer_len),
        "compilation_config": {"cudagraph_capture_sizes": passes},
    }
    if chain:
        found["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [rate ** (i + 1) for i in range(chain)],
        }
    return found
