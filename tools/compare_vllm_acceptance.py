"""The same head in vLLM (or SGLang) and in fledge: acceptance at each position, speed, same text.

Every step is short, writes one file and is skipped when that file is there, so that a machine lent
for minutes gets through them one by one:
    tool=tools/compare_vllm_acceptance.py
    python $tool prompts --target T --file held-out.jsonl --out W/prompts.json
    python $tool vllm --target T --head EXPORTED --work W
    python $tool fledge --target T --head HEAD --work W
    python $tool compare --target T --work W --out benchmarks/FILE.json

`vllm` takes the Python of its environment (`--python`); fledge's own unless told otherwise. The
step `sglang` does the same in SGLang, and `compare --engine sglang` reads it; what an installation
lacks is told by `--engine-options '{"attention_backend": "triton", ...}'`. With `--head` prompts
are answered with the head and without it, by two engines that start side by side and answer one
after the other; their logs and what they have found so far are in W/STEP-head and W/STEP-plain.
Both draft the same chain, greedily, in groups of the same sizes; the first group of each warms up.
`fledge` answers a third time as it serves, with the controller choosing chains up to that one.
`compare` looks at texts of both engines, with a head and without, wherever they part; `--no-speeds`
leaves out speeds that were measured beside other work. It needs no GPU.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from acceptance_table import MAX_DIFFERENCE, NEAR_TIE, compare_group, pool_groups

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.settings import TreeSettings
from fledge.interop.engines.acceptance import our_acceptance
from fledge.interop.engines.installation import find_engine
from fledge.interop.engines.job import EngineRun, run_in_engine
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target_facts import read_facts
from fledge.models.weights_identity import weights_identity

ENGINES: tuple[OutsideEngine, ...] = ("vllm", "sglang")
TEXT_KEYS = ("prompt", "question", "instruction", "text")


def main() -> None:
    options = parse()
    if options.step in ANSWERED:
        answer(options)
        return
    document = STEPS[options.step](options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


def answer(options: argparse.Namespace) -> None:
    """With the head, where there is one, and without: other engines side by side, ours in turn."""

    def one(how: str) -> None:
        out = options.work / f"{options.step}-{how}.json"
        if out.exists():
            print(f"{out} is there already")
            return
        head = None if how == "plain" else options.head.absolute()
        document = ANSWERED[options.step](options, head, how)
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}: {document['took_s']:.1f} s", flush=True)

    ways = ("head", "plain") if options.head else ("plain",)
    if options.step == "fledge":
        for how in (*ways, "adaptive") if options.head else ways:
            one(how)
        return
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(one, how) for how in ways]
    for done in waiting:
        done.result()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=(*STEPS, *ANSWERED))
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--groups", default="1,8,32", help="sizes of groups answered together")
    parser.add_argument("--alone", type=int, default=8, help="prompts of the group size 1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="whom to compare with")
    parser.add_argument("--engine-options", type=json.loads, default={})
    parser.add_argument("--python", type=Path)
    parser.add_argument("--memory-share", type=float, default=0.4, help="of each engine")
    parser.add_argument("--timeout-s", type=float, help="for an engine to start and answer")
    parser.add_argument("--no-speeds", action="store_true")
    parser.add_argument("--commit", help="where the tree is not a checkout")
    return parser.parse_args()


def make_prompts(options: argparse.Namespace) -> dict[str, Any]:
    """Prompts as token ids, so that no chat template makes a difference."""
    lines = options.file.read_text(encoding="utf-8").splitlines()
    texts = [text_of(line) for line in lines if line.strip()][: options.count]
    tokenizer = read_facts(resolve_target(options.target).directory).tokenizer
    return {"file": options.file.name, "prompts": [tokenizer.encode_prompt(one) for one in texts]}


def text_of(line: str) -> str:
    """A line of plain text, or the prompt in a JSON object."""
    if not line.startswith("{"):
        return line
    row = json.loads(line)
    if "turns" in row:
        return str(row["turns"][0])
    return next(str(row[key]) for key in TEXT_KEYS if key in row)


def read_groups(options: argparse.Namespace) -> list[tuple[int, list[list[int]]]]:
    """Sizes of groups with the prompts to answer in them."""
    prompts = json.loads((options.work / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    sizes = [int(size) for size in options.groups.split(",")]
    return [(size, prompts[: options.alone] if size == 1 else prompts) for size in sizes]


def dtype_name(options: argparse.Namespace) -> str:
    return str(pick_dtype(options.dtype, pick_device())).removeprefix("torch.")


def room_for(options: argparse.Namespace, groups: list[tuple[int, list[list[int]]]]) -> int:
    """Tokens of cache that the largest group needs: others may use the device as well."""
    longest = max(len(ids) for _, prompts in groups for ids in prompts)
    return max(size for size, _ in groups) * (longest + options.max_tokens + 64)


def how_run(options: argparse.Namespace) -> dict[str, Any]:
    device = pick_device()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "depth": options.depth,
        "dtype": dtype_name(options),
        "engine_options": options.engine_options,
        "provenance": provenance.collect(device=name, commit=options.commit),
    }


def run_engine(options: argparse.Namespace, head: Path | None, how: str) -> dict[str, Any]:
    """The engine that the step names loads once and answers all groups."""
    engine = find_engine(options.step, options.python)
    directory = resolve_target(options.target).directory
    facts, groups = read_facts(directory), read_groups(options)
    longest = max(len(ids) for _, prompts in groups for ids in prompts)
    runs = [
        EngineRun(
            target=directory.absolute(),
            head=head,
            tree=TreeSettings(depth=options.depth, width=1, budget=options.depth),
            prompts=tuple(tuple(ids) for ids in prompts),
            params=SamplingParams(max_tokens=options.max_tokens),
            eos_token_ids=tuple(facts.eos_token_ids),
            dtype=dtype_name(options),
            max_model_len=longest + options.max_tokens + 64,
            max_requests=max(size for size, _ in groups),
            group_size=size,
            memory_share=options.memory_share,
            engine_options=options.engine_options,
        )
        for size, prompts in groups
    ]
    start = time.perf_counter()
    if pick_device().type == "cuda":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = run_in_engine(
        engine,
        runs,
        timeout_s=options.timeout_s,
        keep_in=options.work / f"{options.step}-{how}",
        turn=options.work / f"{options.step}.turn",
    )
    measured = {
        str(size): {
            "token_ids": answers.token_ids,
            "num_drafts": answers.acceptance.num_drafts,
            "accepted_at_position": answers.acceptance.accepted_at_position,
            "tokens_per_s": answers.num_tokens / answers.seconds,
        }
        for (size, _), answers in zip(groups, found, strict=True)
    }
    took = time.perf_counter() - start
    return {"version": engine.version, "groups": measured, "took_s": took, **how_run(options)}


def run_fledge(options: argparse.Namespace, head: Path | None, how: str) -> dict[str, Any]:
    """Our engine with the same chain in every cycle, or with what its controller chooses."""
    tree = TreeSettings(depth=options.depth, width=1, budget=options.depth)
    groups = read_groups(options)
    start = time.perf_counter()
    settings = EngineSettings(
        tree=tree,
        controller="adaptive" if how == "adaptive" else "fixed",
        copies=False,  # others ask the head for every draft
        max_requests=max(size for size, _ in groups),
        cache_tokens=room_for(options, groups),
        share_prefixes=False,
    )
    engine = Engine.load(options.target, head, settings, dtype=options.dtype)
    engine.capture_ahead()  # as `serve` does before the first request
    params = SamplingParams(max_tokens=options.max_tokens)
    measured = {}
    for size, prompts in groups:
        engine.generate(prompts[:size], params)
        began = time.perf_counter()
        completions = [
            completion
            for first in range(0, len(prompts), size)
            for completion in engine.generate(prompts[first : first + size], params)
        ]
        seconds = time.perf_counter() - began
        acceptance = our_acceptance(completions, options.depth, "verified")
        measured[str(size)] = {
            "token_ids": [completion.token_ids for completion in completions],
            "num_drafts": acceptance.num_drafts,
            "accepted_at_position": acceptance.accepted_at_position if head else (),
            "tokens_per_s": sum(len(one.token_ids) for one in completions) / seconds,
        }
    facts = {"took_s": time.perf_counter() - start, **how_run(options)}
    return {"groups": measured, "head_weights": head and weights_identity(head), **facts}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """What differs; fails where it is more than rounding can explain."""
    found = {
        (who, how): json.loads(path.read_text(encoding="utf-8"))
        for who in (options.engine, "fledge")
        for how in ("head", "plain", "adaptive")
        if (path := options.work / f"{who}-{how}.json").exists()
    }
    theirs, ours = found[options.engine, "head"], found["fledge", "head"]
    room = room_for(options, read_groups(options))
    settings = EngineSettings(cache_tokens=room)
    engine = Engine.load(options.target, settings=settings, dtype=options.dtype)
    groups = {
        str(size): compare_group(
            engine,
            prompts,
            {key: one["groups"][str(size)] for key, one in found.items()},
            options.engine,
            with_speeds=not options.no_speeds,
        )
        for size, prompts in read_groups(options)
    }
    acceptance = pool_groups(
        {
            who: [one["groups"][str(size)] for size, _ in read_groups(options)]
            for who, one in ((options.engine, theirs), ("fledge", ours))
        }
    )
    widest = max(abs(value) for value in acceptance["difference_at_position"])
    parted = sum(
        texts["parted_elsewhere"] for group in groups.values() for texts in group["texts"].values()
    )
    print(f"widest difference {widest:.4f}; texts parted without a near-tie {parted}")
    return {
        "provenance": ours["provenance"],
        "provenance_of_texts_compared": how_run(options)["provenance"],
        options.engine: theirs["version"],
        "engine_options": theirs["engine_options"],
        "target": Path(options.target).name,
        "head_weights": ours.get("head_weights"),
        "depth": ours["depth"],
        "dtype": ours["dtype"],
        "near_tie_nats": NEAR_TIE,
        "acceptance": acceptance,
        "groups": groups,
        "is_acceptance_ours": widest <= MAX_DIFFERENCE,
        "is_text_ours": parted == 0,
    }


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "prompts": make_prompts,
    "compare": compare,
}
ANSWERED: dict[str, Callable[[argparse.Namespace, Path | None, str], dict[str, Any]]] = {
    "vllm": run_engine,
    "sglang": run_engine,
    "fledge": run_fledge,
}


if __name__ == "__main__":
    main()
