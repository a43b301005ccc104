"""Puts acceptance and texts of two engines side by side: the `compare` of the tool for that."""

from typing import Any

from fledge import Engine, SamplingParams

MAX_DIFFERENCE = 0.02
NEAR_TIE = 0.375
"""Nats between the two tokens where two texts part: three steps of a bfloat16 logit between 16 and
32, where the best ones lie. One engine's own texts part at up to 0.32 when its batches change."""


def compare_group(
    engine: Engine,
    prompts: list[list[int]],
    found: dict[tuple[str, str], Any],
    other: str,
    *,
    with_speeds: bool,
) -> dict[str, Any]:
    """Acceptance, texts and speeds of one size of groups."""
    speeds = {f"{who} {how}": one["tokens_per_s"] for (who, how), one in found.items()}
    return {
        "prompts": len(prompts),
        **pool_groups({who: [found[who, "head"]] for who in (other, "fledge")}),
        **({"tokens_per_s": speeds} if with_speeds else {}),
        "texts": {
            f"{' '.join(first)} and {' '.join(second)}": compare_texts(
                engine, prompts, found[first]["token_ids"], found[second]["token_ids"]
            )
            for first, second in text_pairs(other)
            if first in found and second in found
        },
    }


def text_pairs(other: str) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    between = [((other, how), ("fledge", how)) for how in ("head", "plain")]
    return [*between, *(((who, "plain"), (who, "head")) for who in (other, "fledge"))]


def pool_groups(counted: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Shares of all cycles whose drafts were accepted up to a position, and of those before it."""
    cycles = {who: sum(one["num_drafts"] for one in groups) for who, groups in counted.items()}
    accepted = {
        who: [sum(at) for at in zip(*(one["accepted_at_position"] for one in groups), strict=True)]
        for who, groups in counted.items()
    }
    shares = {who: [at / max(cycles[who], 1) for at in accepted[who]] for who in counted}
    theirs, ours = shares.values()
    return {
        "cycles": cycles,
        "accepted_up_to_position": shares,
        "difference_at_position": [
            round(one - our, 5) for one, our in zip(theirs, ours, strict=True)
        ],
        "accepted_given_those_before": {
            who: [
                at / max(before, 1) for at, before in zip(hits, [cycles[who], *hits], strict=False)
            ]
            for who, hits in accepted.items()
        },
    }


def compare_texts(
    engine: Engine, prompts: list[list[int]], theirs: list[list[int]], ours: list[list[int]]
) -> dict[str, Any]:
    """Where texts part, how much more probable our token was than theirs."""
    parted = []
    for prompt, one, other in zip(prompts, theirs, ours, strict=True):
        pairs = zip(one, other, strict=False)
        place = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if place is not None:
            parted.append(([*prompt, *other[:place]], one[place], other[place]))
    asked = [text for text, *_ in parted]
    answers = engine.generate(asked, SamplingParams(max_tokens=1, logprobs=20)) if asked else []
    gaps = []
    for completion, (_, one_id, other_id) in zip(answers, parted, strict=True):
        assert completion.logprobs is not None
        top = dict(completion.logprobs[0].top)
        gaps.append(abs(top.get(other_id, -99.0) - top.get(one_id, -99.0)))
    num_near = sum(gap <= NEAR_TIE for gap in gaps)
    return {
        "same": len(prompts) - len(parted),
        "parted_at_near_ties": num_near,
        "parted_elsewhere": len(gaps) - num_near,
        "gaps": [round(gap, 4) for gap in sorted(gaps)],
    }
