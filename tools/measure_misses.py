"""Where chains of a head end, and how sure the target was of what the head did not guess.

    python tools/measure_misses.py --head HEAD --suite bench/gsm8k_test.jsonl --out FILE.json

The target answers greedily, and the head follows each answer: a cycle begins behind the last token
that is known, drafts a chain, and goes on behind the first draft that the text does not have. All
drafts that a cycle looked at are counted by the probability that the target gave its own token
there. A head that is wrong where the target is sure lacks something that can be learned; where the
target hardly preferred its token to another, little is to be won.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from answered_suites import answered
from replay_acceptance import drafted

from fledge.contracts import provenance
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.ops.documents import make_documents

EDGES = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)


class Draft(NamedTuple):
    """One that a cycle looked at."""

    depth: int
    sureness: float
    """The target's probability of its own token there."""

    is_right: bool
    is_second: bool
    """Whether the target held nothing but its own token likelier than this draft."""


def follow(
    drafts_TK: torch.Tensor, probs_TV: torch.Tensor, token_ids: Sequence[int], prompt_len: int
) -> Iterator[Draft]:
    last = prompt_len  # the target itself says the first token behind the prompt
    while last + 1 < len(token_ids):
        found = 0
        while found < drafts_TK.shape[1] and last + 1 + found < len(token_ids):
            draft, token = int(drafts_TK[last - 1, found]), token_ids[last + 1 + found]
            probs_V = probs_TV[last + found]
            is_second = int((probs_V > probs_V[draft]).sum()) == 1
            yield Draft(found, float(probs_V[token]), draft == token, is_second)
            if draft != token:
                break
            found += 1
        last += found + 1


@torch.no_grad()
def drafts_along(
    target: Target, head: Eagle3Head, prompt: list[int], answer: Sequence[int], depth: int
) -> Iterator[Draft]:
    token_ids = [*prompt, *answer]
    documents = make_documents((len(token_ids),), target.device)
    reading = target.read(torch.tensor(token_ids), documents, ())
    probs_TV = target.readout.logits(reading.final_TD).softmax(dim=-1)
    drafts_TK = drafted(target, head, token_ids, depth)
    yield from follow(drafts_TK, probs_TV, token_ids, len(prompt))


def summary(drafts: Sequence[Draft], num_tokens: int) -> dict[str, Any]:
    wrong = [one for one in drafts if not one.is_right]
    by_sureness = []
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        inside = [one for one in drafts if low <= one.sureness < high or one.sureness == high == 1]
        num_wrong = sum(not one.is_right for one in inside)
        by_sureness.append(
            {
                "target_probability": [low, high],
                "share_of_drafts": len(inside) / len(drafts),
                "wrong": num_wrong / max(1, len(inside)),
                "share_of_wrong": num_wrong / max(1, len(wrong)),
            }
        )
    return {
        "num_tokens": num_tokens,
        "num_drafts": len(drafts),
        "num_wrong": len(wrong),
        "wrong_by_depth": [
            sum(one.depth == depth for one in wrong)
            for depth in range(1 + max(one.depth for one in drafts))
        ],
        "wrong_that_are_the_second_best": sum(one.is_second for one in wrong) / max(1, len(wrong)),
        "by_target_probability": by_sureness,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cpu")
    directory = resolve_target(options.target).directory
    target = Target.load(directory, dtype=torch.float32, device=device)
    head = fit_to_target(load_head(options.head), target)
    asked = {"prompts": options.prompts, "max_tokens": options.max_tokens}
    texts = answered(target, [options.suite], **asked)
    drafts: list[Draft] = []
    for prompt, answer in texts:
        drafts += drafts_along(target, head, prompt, answer, options.depth)
    if not drafts:
        parser.error(f"no answer of {options.suite} has more than one token: nothing is drafted.")
    document = {
        "what": "drafts of a chain by how sure the target was of its own token",
        "target": options.target,
        "head": options.head.name,
        "suite": Path(options.suite).name,
        "prompts": len(texts),
        "depth": options.depth,
        **summary(drafts, sum(len(answer) for _, answer in texts)),
        "provenance": provenance.collect(device="cpu"),
    }
    print(json.dumps(document, indent=1))
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
