"""What a head would have drafted along texts that another engine wrote: acceptance on equal texts.

    python tools/replay_acceptance.py --target T --head HEAD --work W --engine vllm --out FILE.json

Texts of two engines part where two tokens are nearly as probable, and their acceptance is then that
of different texts. Here fledge's head follows, in float32, what each engine said with the head:
a cycle begins behind the last token that is known, drafts a chain, and goes on behind the first
draft that the text does not have. `W` is a folder of `compare_vllm_acceptance.py`. What the engine
counted itself stands beside it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measured_engines import load_once
from torch import Tensor

from fledge.contracts import provenance
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.training.ttt_steps import FastSteps


@torch.no_grad()
def drafted(target: Target, head: Eagle3Head, token_ids: Sequence[int], depth: int) -> Tensor:
    """Drafts [T, K] as target tokens: at index t those of tokens t+2, t+3, ... ."""
    tokens_T = torch.tensor(token_ids, device=target.device)
    documents = make_documents((len(token_ids),), target.device)
    taps = head.config.resolve_taps(len(target.layers))
    reading = target.read(tokens_T, documents, taps)
    nothing_R = torch.empty(0, dtype=torch.long, device=target.device)
    batch = MicroBatch(
        token_ids_T=tokens_T,
        loss_mask_T=torch.ones_like(tokens_T, dtype=torch.bool),
        documents=documents,
        features_TF=reading.features_TF,
        targets=TargetRows(nothing_R, nothing_R, nothing_R.float()),
        sample_numbers=(0,),
    )
    steps = FastSteps(head, is_compiled=False)
    normed = steps(batch, None, reading.features_TF, target.embedding.weight, depth)
    best_TK = torch.stack([head.logits(one).argmax(dim=-1) for one in normed], dim=1)
    return head.draft_to_target_V[best_TK].cpu()


def follow(drafts_TK: Tensor, token_ids: Sequence[int], prompt_len: int) -> tuple[int, list[int]]:
    """Cycles along a text, and how many of them accepted each position of the chain."""
    depth = drafts_TK.shape[1]
    cycles, accepted = 0, [0] * depth
    last = prompt_len  # the target itself says the first token behind the prompt
    while last + 1 < len(token_ids):
        cycles += 1
        found = 0
        while (
            found < depth
            and last + 1 + found < len(token_ids)
            and int(drafts_TK[last - 1, found]) == token_ids[last + 1 + found]
        ):
            accepted[found] += 1
            found += 1
        last += found + 1
    return cycles, accepted


def replay(
    target: Target, head: Eagle3Head, prompts: list[list[int]], group: dict[str, Any], depth: int
) -> dict[str, Any]:
    """All texts of one engine."""
    cycles, accepted = 0, [0] * depth
    for prompt, answer in zip(prompts, group["token_ids"], strict=True):
        token_ids = [*prompt, *answer]
        more, hits = follow(drafted(target, head, token_ids, depth), token_ids, len(prompt))
        cycles += more
        accepted = [one + other for one, other in zip(accepted, hits, strict=True)]
    counted, own = group["num_drafts"], group["accepted_at_position"]
    replayed = [one / max(cycles, 1) for one in accepted]
    shares = [one / max(counted, 1) for one in own]
    return {
        "cycles": {"counted": counted, "replayed": cycles},
        "accepted_up_to_position": {"counted": shares, "replayed": replayed},
        "difference_at_position": [
            round(one - other, 5) for one, other in zip(shares, replayed, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--group", default="64")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load_once(options.target, "", "cpu", "float32")
    head = fit_to_target(load_head(options.head), target)
    prompts = json.loads((options.work / "prompts.json").read_bytes())["prompts"]
    document: dict[str, Any] = {
        "what": "acceptance as engines counted it, and of fledge's head along the same texts",
        "target": options.target,
        "group": options.group,
        "engines": {},
        "provenance": provenance.collect(device="cpu"),
    }
    for who in (options.engine, "fledge"):
        found = json.loads((options.work / f"{who}-head.json").read_bytes())
        group, depth = found["groups"][options.group], found["depth"]
        document["engines"][who] = replay(target, head, prompts, group, depth)
        print(who, json.dumps(document["engines"][who]), flush=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
