"""How few numbers of a head's output decide which token it drafts.

    python tools/measure_draft_rank.py --head HEAD --suite bench/gsm8k_test.jsonl --out FILE.json

The target answers greedily and the head follows each answer, drafting a chain from every token of
it. What stands before the output matrix is kept: that of every other answer says in which
directions logits differ most, that of the rest says how often the best of all drafted tokens is
among the first few by these directions alone. Where a few are enough, a CPU could look for
candidates in a matrix of that many columns, and make the logits of the candidates in full.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from answered_suites import answered
from replay_acceptance import drafted
from torch import Tensor

from fledge.contracts import provenance
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.resolve import resolve_target
from fledge.models.target import Target

RANKS = (48, 64, 96, 128, 192)
FIRST = (1, 8, 16, 32, 64)
_LEAST_VARIANCE = 1e-6
"""Of directions that hardly occur, as a share of the mean: they are to be divided by."""


@torch.no_grad()
def outputs_along(
    target: Target, head: Eagle3Head, prompt: Sequence[int], answer: Sequence[int], depth: int
) -> Tensor:
    """What the head's output matrix reads while chains are drafted from all tokens of an answer."""
    seen: list[Tensor] = []
    hook = head.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        drafted(target, head, [*prompt, *answer], depth)
    finally:
        hook.remove()
    return torch.cat([one[len(prompt) - 1 :] for one in seen])


def projection(rows_VD: Tensor, known_TD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """R numbers of an output and rows for them whose products are the logits, as nearly as can be
    on average over the outputs that are known: [R, D] and [V, R]."""
    second_DD = known_TD.T @ known_TD / len(known_TD)
    mean = second_DD.diagonal().mean()
    values, vectors = torch.linalg.eigh(second_DD)
    sizes = values.clamp(min=_LEAST_VARIANCE * mean).sqrt()
    root_DD = vectors * sizes @ vectors.T
    inverse_DD = vectors / sizes @ vectors.T
    _, _, directions = torch.linalg.svd(rows_VD @ root_DD, full_matrices=False)
    first_RD = directions[:rank]
    return first_RD @ inverse_DD, rows_VD @ root_DD @ first_RD.T


def found_among_first(
    rows_VD: Tensor, known_TD: Tensor, asked_TD: Tensor, rank: int
) -> dict[str, float]:
    """How often the best token by all columns is among the first few by so many numbers."""
    reduce_RD, reduced_VR = projection(rows_VD, known_TD, rank)
    found = dict.fromkeys(map(str, FIRST), 0.0)
    for part_TD in torch.split(asked_TD, 256):
        best_T = (part_TD @ rows_VD.T).argmax(dim=1, keepdim=True)
        about_TV = part_TD @ reduce_RD.T @ reduced_VR.T
        above_T = (about_TV > about_TV.gather(1, best_T)).sum(dim=1)
        for first in FIRST:
            found[str(first)] += float((above_T < first).sum()) / len(asked_TD)
    return found


def summary(rows_VD: Tensor, known_TD: Tensor, asked_TD: Tensor) -> dict[str, Any]:
    return {
        "drafted_tokens": len(rows_VD),
        "columns": rows_VD.shape[1],
        "known_outputs": len(known_TD),
        "asked_outputs": len(asked_TD),
        "best_token_among_first": {
            str(rank): found_among_first(rows_VD, known_TD, asked_TD, rank) for rank in RANKS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--suite", action="append", required=True)
    parser.add_argument("--prompts", type=int, default=16, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cpu")
    directory = resolve_target(options.target).directory
    target = Target.load(directory, dtype=torch.float32, device=device)
    whole = load_head(options.head)
    whole.common_V = None  # all tokens are to be compared
    head = fit_to_target(whole, target)
    texts = answered(target, options.suite, prompts=options.prompts, max_tokens=options.max_tokens)
    outputs = [
        outputs_along(target, head, prompt, answer, options.depth) for prompt, answer in texts
    ]
    rows_VD = head.lm_head.weight.detach().float()
    document = {
        "what": "how often the token a head drafts is among the first by few numbers of its output",
        "target": options.target,
        "head": options.head.name,
        "suites": [Path(name).name for name in options.suite],
        "prompts": len(texts),
        "depth": options.depth,
        **summary(rows_VD, torch.cat(outputs[::2]), torch.cat(outputs[1::2])),
        "provenance": provenance.collect(device="cpu"),
    }
    print(json.dumps(document, indent=1))
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
