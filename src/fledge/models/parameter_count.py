"""How many parameters a target has, from its config alone."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from fledge.models.quiet import quiet_transformers

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ParameterCount(NamedTuple):
    total: int
    active: int
    """Those that a token is multiplied with: the experts it is sent to, and no embedding."""


def count_parameters(config: Any) -> ParameterCount:
    """Lay the model out without memory and count."""
    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".experts." in name and ".shared_experts." not in name
    )
    matrix = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is matrix
    idle = round(experts * (1 - _share_of_experts(config.get_text_config())))
    return ParameterCount(total, total - idle - (0 if is_tied else matrix.numel()))


def _share_of_experts(config: Any) -> float:
    """Of the experts, how many a token is sent to."""
    counts = [getattr(config, name, None) for name in _EXPERT_COUNTS]
    num_experts = next((count for count in counts if count), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / num_experts if num_experts and chosen else 1.0
