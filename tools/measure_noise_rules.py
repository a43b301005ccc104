"""Which candidates, filters and scores suit drafts with the target's noise, along sampled answers.

    python tools/measure_noise_rules.py --suite gsm8k --suite mt-bench --out FILE.json

Chains are drafted and verified. Wherever the target has chosen a token behind drafts that were
right, the head's candidates are kept, and rules are compared by what they would have drafted there.
With trees in mind each rule names 8 children, and of all these the best 2 a row are looked at.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from measure_copies import spread
from measure_noise import add_subject, load_pair, sampling_of
from torch import Tensor

from fledge import Engine, EngineSettings, TreeSettings
from fledge.contracts import provenance
from fledge.engine.head_children import HeadChildren, Modes
from fledge.engine.head_drafter import HeadDrafter
from fledge.lab.suites import load_suite
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops import noised_top
from fledge.ops.accept import Walk
from fledge.ops.draft_level import Proposal
from fledge.ops.noised_top import Draws
from fledge.ops.top_logprobs import TopLogprobs, top_logprobs
from fledge.ops.tree import TreeBatch

MOST, WIDTH, EACH, DEPTH = 64, 8, 2, 7
CANDIDATES, DROPPED, SCALES = (8, 16, 32, 64), (0.0, 2.0, 1e4), (1.0, 1.5, 2.0)


class Seen(NamedTuple):
    """Candidates of rows, how their requests sample, and what the target said there."""

    top: TopLogprobs
    draws: Draws
    said_T: Tensor

    def take(self, rows_I: Tensor) -> "Seen":
        top = TopLogprobs(*(one[rows_I] for one in self.top))
        return Seen(top, Draws(*(one[rows_I] for one in self.draws)), self.said_T[rows_I])


class Watched(HeadChildren):
    """Children as ever, and what they were chosen from."""

    levels: list[TopLogprobs]
    draws: Draws | None = None

    def below(self, normed_TD: Tensor, width: int, depth: int, modes: Modes) -> Proposal:
        if depth == 1:
            self.levels, self.draws = [], modes.draws
        self.levels.append(top_logprobs(self._head.logits(normed_TD), MOST))
        return super().below(normed_TD, width, depth, modes)


class WatchedDrafter(HeadDrafter):
    def watch(self) -> None:
        self._children = self.watched = Watched(self.head, self.calibration)
        self.seen = list[Seen]()

    def observe(self, trees: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        draws = self.watched.draws
        assert draws is not None
        for level, top in enumerate(self.watched.levels[: walk.tokens_BL.shape[1]]):
            there = draws._replace(position_B=draws.position_B + level)
            seen = Seen(top, there, walk.tokens_BL[:, level])
            self.seen.append(seen.take((walk.lengths_B > level).nonzero()[:, 0]))
        super().observe(trees, walk, sampled_B)


def watch(target: Target, head: Eagle3Head, asked: Sequence[Any], words: str, length: int) -> Seen:
    tree = TreeSettings(depth=DEPTH, width=1, budget=DEPTH)
    settings = EngineSettings(tree=tree, controller="fixed", copies=False, max_requests=len(asked))
    drafter = WatchedDrafter(head, target, settings, has_noise=True)
    drafter.watch()
    # Whoever asks for logprobs has cycles of the ordinary kind, which can be watched.
    params = sampling_of(words, length, len(asked), logprobs=0)
    Engine(target, settings=settings, drafter=drafter).generate(asked, params)
    tops, draws, said = zip(*drafter.seen, strict=True)
    return Seen(
        TopLogprobs(*(torch.cat(column) for column in zip(*tops, strict=True))),
        Draws(*(torch.cat(column) for column in zip(*draws, strict=True))),
        torch.cat(said),
    )


def judged(seen: Seen, to_target_V: Tensor, top: TopLogprobs) -> dict[str, float]:
    """How often the first child is right, any of them, and any of the best of all."""
    right_TW = to_target_V[top.indices_TK] == seen.said_T[:, None]
    best = top.logprobs_TK.flatten().argsort(descending=True)[: EACH * len(right_TW)]
    probs_TW = top.logprobs_TK.exp().clamp(1e-4, 1 - 1e-4)
    loss_TW = torch.where(right_TW, probs_TW, 1 - probs_TW).log()
    return {
        "first": round(float(right_TW[:, 0].float().mean()), 4),
        "any": round(float(right_TW.any(dim=1).float().mean()), 4),
        "best": round(float(right_TW.flatten()[best].sum() / len(right_TW)), 4),
        "log_loss": round(-float(loss_TW.mean()), 4),
    }


def rules(seen: Seen, to_target_V: Tensor) -> Iterator[dict[str, Any]]:
    plain = TopLogprobs(*(one[:, :WIDTH] for one in seen.top))
    yield {"candidates": 0, **judged(seen, to_target_V, plain)}
    for count, dropped, scale in product(CANDIDATES, DROPPED, SCALES):
        noised_top.DROPPED, noised_top.SCALE = dropped, scale
        top = TopLogprobs(*(one[:, :count] for one in seen.top))
        found = noised_top.noised_top(top, to_target_V, seen.draws, depth=1, width=WIDTH)
        rule = {"candidates": count, "dropped": dropped, "scale": scale}
        yield {**rule, **judged(seen, to_target_V, found)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_subject(parser, prompts=8, max_tokens=48, samplings=["1.0", "0.7/0.9", "1.0/0.5"])
    options = parser.parse_args(words)
    target, head = load_pair(parser, options, torch.device("cpu"))
    asked = [
        prompt.messages()
        for name in options.suite
        for prompt in spread(load_suite(name).prompts, options.prompts)
    ]
    document: dict[str, Any] = {
        "what": "rules for drafts with the target's noise; candidates 0 are drafts without it",
        "prompts": len(asked),
        "max_tokens": options.max_tokens,
        "best_each": EACH,
        "samplings": {},
        "provenance": provenance.collect(device="cpu"),
    }
    for sampling in options.sampling:
        seen = watch(target, head, asked, sampling, options.max_tokens)
        found = list(rules(seen, head.draft_to_target_V))
        document["samplings"][sampling] = {"rows": len(seen.said_T), "rules": found}
        print(sampling, len(seen.said_T), flush=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
