"""Counts where speculative greedy decoding differs from plain decoding, and by what margin.

In bfloat16 a pass over a tree and a pass over one token round differently, so the argmax may change
where the two best logits are nearly equal. For each prompt this finds the first token at which the
two answers differ, and measures how far apart the two candidates are in the target's own logits.
In float32 it also asks transformers' own generate, and nothing should differ.

    python tools/measure_near_ties.py --target T --out benchmarks/FILE.json [--head HEAD]
                                      [--prompts FILE.jsonl] [--num-prompts N] [--dtype bfloat16]

On CUDA drafts of a head run in captured cycles ahead of the host; the same cycles planned one by
one stand beside them. Scripted drafts always take the second way.
"""

import argparse
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.outputs import Completion
from fledge.contracts.provenance import collect
from fledge.contracts.settings import GRAPHS
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.ops.kv import KVPool
from fledge.ops.packed import SequencePart, pack
from fledge.testing import ScriptedDrafter

PROMPTS = (
    "Write a short story about a dragon who learns to bake bread.",
    "Explain why the sky is blue to a child.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to check before a long bicycle tour.",
    "Summarise the causes of the French Revolution in one paragraph.",
    "Translate into German: The weather is nice and we are going to the lake.",
    "What is the difference between a virus and a bacterium?",
)
NEAR = 2.0
"""Steps of bfloat16 between two logits that rounding may exchange: one in each of two passes."""

TREE = {"depth": 6, "width": 4, "budget": 40}


def random_head(target: Target, seed: int = 0) -> Eagle3Head:
    """A head of the usual proportions with small random weights: its drafts are noise."""
    torch.manual_seed(seed)
    heads = int(target.config.num_attention_heads)
    config = HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_heads=heads,
        num_kv_heads=int(target.config.num_key_value_heads),
        head_dim=target.hidden_size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(8192, target.vocab_size),
    )
    return Eagle3Head(config).eval()


def logits_after(target: Target, token_ids: list[int]) -> torch.Tensor:
    """The target's logits for the token that follows, by one plain pass over the whole text."""
    count = len(token_ids)
    positions = torch.arange(count, device=target.device)
    part = SequencePart(
        token_ids_Q=torch.tensor(token_ids, device=target.device),
        positions_Q=positions,
        key_slots_K=positions,
        key_positions_K=positions,
    )
    last = torch.tensor([count - 1], device=target.device)
    output = target.forward(pack([part]), KVPool(count), logit_rows_R=last)
    return output.logits_RV[0].float()


def compare(target: Target, plain: Completion, other: Many[int]) -> dict[str, Any] | None:
    """The first difference between two answers, or None when they are equal."""
    pairs = zip(plain.token_ids, other, strict=False)
    for index, (expected, actual) in enumerate(pairs):
        if expected == actual:
            continue
        context = [*plain.prompt_token_ids, *plain.token_ids[:index]]
        logits = logits_after(target, context)
        best = logits.topk(2).values.tolist()
        return {
            "position": index,
            "plain_token": expected,
            "other_token": actual,
            "margin": abs(float(logits[expected] - logits[actual])),
            "best_logits": best,
            "bfloat16_spacing": 2.0 ** (torch.tensor(best[0]).abs().log2().floor().item() - 7),
        }
    return None


def run(
    engine: Engine, prompts: list[str], params: SamplingParams
) -> tuple[list[Completion], float]:
    """All prompts together, and the seconds they took."""
    start = time.perf_counter()
    completions = engine.generate(prompts, params)
    return completions, time.perf_counter() - start


def read_prompts(path: Path | None, count: int) -> list[str]:
    if path is None:
        return list(PROMPTS[:count])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("prompt") or row["turns"][0] for row in rows]
    return texts[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--head", type=Path, help="a trained head, beside the random one")
    parser.add_argument("--graphs", default="auto", choices=GRAPHS)
    parser.add_argument(
        "--num-transformers", type=int, default=len(PROMPTS), help="prompts for its generate"
    )
    parser.add_argument("--cache-tokens", type=int, default=0, help="of every engine")
    parser.add_argument("--commit", help="where the tree is not a git checkout")
    args = parser.parse_args()

    settings = EngineSettings(graphs=args.graphs, cache_tokens=args.cache_tokens)
    engine = Engine.load(args.target, settings=settings, dtype=args.dtype, device=args.device)
    target = engine.target
    params = SamplingParams(max_tokens=args.max_tokens)
    prompts = read_prompts(args.prompts, args.num_prompts)
    plain, seconds = run(engine, prompts, params)
    report: dict[str, Any] = {
        "provenance": collect(device=device_name(target), commit=args.commit),
        "target": args.target,
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "tree": TREE,
        "head": args.head.name if args.head else None,
        "is_tf32_allowed": torch.backends.cuda.matmul.allow_tf32,
        "plain": {"num_tokens": sum(c.stats.num_tokens for c in plain), "seconds": seconds},
        "variants": {},
    }
    if target.dtype == torch.float32:
        some = plain[: args.num_transformers]
        report["variants"]["transformers generate"] = count_differences(
            target, some, answers_of_transformers(target, some, args.max_tokens)
        )
    for name, make in variants(engine, plain, args.head).items():
        completions, seconds = run(make(), prompts, params)
        report["variants"][name] = summarise(target, plain, completions, seconds)
        # Written after each variant: a run that is cut short has still measured something.
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        shown = {k: v for k, v in report["variants"][name].items() if k != "differences"}
        print(name, json.dumps(shown), flush=True)


def variants(
    engine: Engine, plain: list[Completion], head: Path | None
) -> dict[str, Callable[[], Engine]]:
    """Plain decoding in other company, then several kinds of drafts; made when their turn comes."""
    target, settings = engine.target, replace(engine.settings, tree=TreeSettings(**TREE))
    answers = {c.prompt_token_ids: c.token_ids for c in plain}
    one_by_one = replace(settings, graphs="off")
    chain = replace(settings, tree=TreeSettings(depth=5, width=1, budget=5))

    def scripted(accuracy: float) -> Engine:
        drafter = ScriptedDrafter(
            answers, vocab_size=target.vocab_size, accuracy=accuracy, device=target.device, **TREE
        )
        return Engine(target, drafter=drafter, settings=settings)

    found: dict[str, Callable[[], Engine]] = {}
    if head is not None:
        found |= {
            "head, chain of 5": lambda: Engine(target, load_head(head), chain),
            "head, tree": lambda: Engine(target, load_head(head), settings),
            "head, chain of 5, requests alone": lambda: Engine(
                target, load_head(head), replace(chain, max_requests=1)
            ),
            "head, tree, cycles one by one": lambda: Engine(target, load_head(head), one_by_one),
        }
    return found | {
        "plain again": lambda: engine,
        "plain, other batches": lambda: Engine(target, settings=replace(settings, max_requests=3)),
        "plain, cycles one by one": lambda: Engine(target, settings=one_by_one),
        "random head": lambda: Engine(target, random_head(target), settings),
        "scripted drafts, accuracy 0.7": lambda: scripted(0.7),
        "scripted drafts, accuracy 1.0": lambda: scripted(1.0),
    }


def answers_of_transformers(
    target: Target, plain: list[Completion], max_tokens: int
) -> list[list[int]]:
    """The same prompts through transformers' own generate, one at a time."""
    assert target.directory is not None
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=target.dtype)
    model = model.to(target.device).eval()
    answers = []
    for completion in plain:
        ids = torch.tensor([completion.prompt_token_ids], device=target.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
        )
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


def summarise(
    target: Target, plain: list[Completion], other: list[Completion], seconds: float
) -> dict[str, Any]:
    cycles = sum(c.stats.cycles for c in other)
    return {
        "num_tokens": sum(c.stats.num_tokens for c in other),
        "accept_length": sum(c.stats.num_tokens - 1 for c in other) / cycles,
        "seconds": seconds,
        **count_differences(target, plain, [c.token_ids for c in other]),
    }


def count_differences(
    target: Target, plain: list[Completion], other: Many[Many[int]]
) -> dict[str, Any]:
    found = [compare(target, *pair) for pair in zip(plain, other, strict=True)]
    differences = [d for d in found if d]
    return {
        "num_equal": len(found) - len(differences),
        "num_different": len(differences),
        "num_near_ties": sum(d["margin"] <= NEAR * d["bfloat16_spacing"] for d in differences),
        "largest_margin_in_spacings": max(
            (d["margin"] / d["bfloat16_spacing"] for d in differences), default=0.0
        ),
        "differences": differences,
    }


def device_name(target: Target) -> str:
    return torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
