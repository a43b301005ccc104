"""How large a target's tapped states are, token by token, and what norms make of it.

    python tools/measure_tap_sizes.py --target T --out benchmarks/FILE.json [--suite builtin]
                                      [--num-prompts N] [--max-tokens N]

On tokens of the target's own greedy answers. A norm divides a token's states by their root mean
square, which a few large channels may decide. Whether it evens out the rest is seen from the size
of a token when every channel counts alike (in units of its median): how much that varies from token
to token as it is, behind one norm over all taps (`norm_before_fc`), and behind one of each tap
(`fc_norm`). Spreads are standard deviations of logarithms.

Legend: T tokens, F tapped features, D hidden size.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge import Engine, SamplingParams
from fledge.contracts.provenance import collect
from fledge.lab.suites import load_suite
from fledge.models.head_config import default_taps
from fledge.models.target import Target
from fledge.ops.documents import make_documents

_FAR = 20.0
"""Channels that are so many times their median count as this: single outliers say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    engine = Engine.load(args.target, device="cpu", dtype="float32")
    prompts = [prompt.turns[0] for prompt in load_suite(args.suite).prompts][: args.num_prompts]
    first_TF, inside_TF = read_answers(engine, prompts, args.max_tokens)
    report = {
        "provenance": collect(device="CPU"),
        "target": args.target,
        "suite": args.suite,
        "num_prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "taps": default_taps(engine.target.num_layers),
        **describe(first_TF, inside_TF, engine.target.hidden_size),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


@torch.no_grad()
def read_answers(engine: Engine, prompts: list[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Features of the first tokens of prompts, and of all tokens of their answers."""
    answers = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    first, inside = [], []
    for answer in answers:
        start = len(answer.prompt_token_ids)
        features_TF = read(engine.target, [*answer.prompt_token_ids, *answer.token_ids])
        first.append(features_TF[:1])
        inside.append(features_TF[start:])
    return torch.cat(first), torch.cat(inside)


def read(target: Target, token_ids: list[int]) -> Tensor:
    ids_T = torch.tensor(token_ids, device=target.device)
    documents = make_documents([len(ids_T)], target.device)
    return target.read(ids_T, documents, default_taps(target.num_layers)).features_TF.float()


def describe(first_TF: Tensor, inside_TF: Tensor, hidden_size: int) -> dict[str, Any]:
    all_T = root_mean_square(inside_TF)
    shares_F = inside_TF.square().mean(dim=0) / inside_TF.square().mean(dim=0).sum()
    taps = [slice(start, start + hidden_size) for start in range(0, len(shares_F), hidden_size)]
    return {
        "num_tokens": len(inside_TF),
        "all_taps": {
            "root_mean_square": all_T.median().item(),
            "spread": all_T.log().std().item(),
            "of_first_tokens": root_mean_square(first_TF).median().item(),
            "share_of_largest_channels": {
                count: shares_F.topk(count).values.sum().item() for count in (1, 2, 8, 32)
            },
        },
        "each_tap": [describe_tap(inside_TF[:, tap], all_T) for tap in taps],
    }


def describe_tap(features_TD: Tensor, all_T: Tensor) -> dict[str, Any]:
    own_T = root_mean_square(features_TD)
    sizes_D = features_TD.abs().median(dim=0).values
    behind = {
        "no norm": features_TD,
        "norm_before_fc": features_TD / all_T[:, None],
        "fc_norm": features_TD / own_T[:, None],
    }
    return {
        "root_mean_square": own_T.median().item(),
        "spread": own_T.log().std().item(),
        "channels": {
            "smallest": sizes_D.min().item(),
            "middle": sizes_D.median().item(),
            "largest": sizes_D.max().item(),
        },
        "spread_of_balanced_sizes": {
            name: balanced_sizes(one_TD).log().std().item() for name, one_TD in behind.items()
        },
    }


def root_mean_square(features_TF: Tensor) -> Tensor:
    return features_TF.square().mean(dim=-1).sqrt()


def balanced_sizes(features_TD: Tensor) -> Tensor:
    """Of each token, all channels in units of their medians."""
    in_units_TD = features_TD / features_TD.abs().median(dim=0).values
    return root_mean_square(in_units_TD.clamp(-_FAR, _FAR))


if __name__ == "__main__":
    main()
