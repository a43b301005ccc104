"""What tests of native cycles on a CPU share: settings, heads, and a prefix that is met again."""

from dataclasses import replace
from typing import Any

import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.testing import tiny_head
from tests.lossless.support import prompts, token_ids


def chains_of(depth: int, **settings: Any) -> EngineSettings:
    tree = TreeSettings(depth=depth, width=1, budget=depth)
    return replace(EngineSettings(controller="fixed", tree=tree), **settings)


def knowing_head(target: Target) -> Eagle3Head:
    """Adds what the last layer left to nothing else, and multiplies by the target's own matrix."""
    head = tiny_head(target)
    size = target.hidden_size
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -size:] = torch.eye(size)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.lm_head.weight.copy_(target.lm_head_weight_VD[head.draft_to_target_V])
    return head


def meet_a_prefix_again(
    target: Target, first: SamplingParams, second: SamplingParams
) -> tuple[list[list[int]], list[list[int]]]:
    """A request, and one that goes on from its blocks: what both asked and were told."""
    base = prompts(5)[4]
    engine = Engine(target, tiny_head(target), chains_of(3, block_size=4))
    (one,) = engine.generate([base], first)
    longer = [*base, *one.token_ids[:-1]]
    (other,) = engine.generate([longer], second)
    assert other.stats.num_prompt_reused > len(base)
    engine.check_integrity()
    return [base, longer], token_ids([one, other])
