"""A head for OpenVINO GenAI: the directory that optimum-intel turns into OpenVINO's own format.

The turning itself is done by the user's optimum-intel, by the command in the README: it pins its
own versions of everything.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fledge.contracts.errors import ConfigError, MismatchError
from fledge.interop.checkpoint_files import write_checkpoint
from fledge.interop.limits import (
    bias_limit,
    fused_norm_limit,
    num_taps_limit,
    qk_norm_limit,
    refuse,
    residual_limit,
    tap_norm_limit,
    window_limit,
)
from fledge.interop.public_tensors import EMBEDDING, public_tensors
from fledge.interop.taps import check_ascending
from fledge.interop.target_facts import TargetFacts
from fledge.interop.target_matrices import read_embedding
from fledge.interop.vllm_export import flat_config
from fledge.models.head import Eagle3Head

_ENGINE = "OpenVINO GenAI"
LAYERS = "hidden_layers_list"
"""Ids of the layers whose outputs are handed over. OpenVINO looks for it in the converted model, to
which optimum-intel does not take it over; without it, it takes the outputs of layers 2, n//2 and
n-3, each one later than what everybody else calls the default."""


def layer_outputs(taps: Sequence[int]) -> list[int]:
    """Completed layers as ids of the layers whose outputs they are."""
    return [tap - 1 for tap in taps]


def check_openvino(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what optimum-intel or OpenVINO GenAI would misread."""
    config = head.config
    limits = (
        residual_limit,
        fused_norm_limit,
        bias_limit,
        qk_norm_limit,
        window_limit,
        tap_norm_limit,
        num_taps_limit,
    )
    refuse(_ENGINE, (limit(config, _ENGINE) for limit in limits))
    refuse(
        _ENGINE,
        (
            (
                config.target_hidden_size != config.hidden_size,
                f"its hidden size {config.hidden_size} is not the target's "
                f"{config.target_hidden_size}.",
                "Export it for vLLM.",
            ),
        ),
    )
    if target is None:
        raise ConfigError(
            "OpenVINO's heads hold the target's embedding; name the target with --target."
        )
    taps = config.resolve_taps(target.num_layers)
    check_ascending(taps, _ENGINE)
    if taps[0] == 0:
        raise MismatchError(
            f"OpenVINO GenAI hands over the outputs of layers; this head reads {list(taps)}, and 0 "
            "is the embedding. Export it for vLLM or as GGUF."
        )


def write_openvino(head: Eagle3Head, directory: Path, target: TargetFacts) -> None:
    data = flat_config(head, target)
    data[LAYERS] = layer_outputs(head.config.resolve_taps(target.num_layers))
    tensors = public_tensors(head)
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = read_embedding(target).to(head.fc.weight.dtype).contiguous()
    write_checkpoint(data, tensors, directory)


def without_shared_embedding(head: Eagle3Head, target: TargetFacts) -> Eagle3Head:
    """The head as it was before the target's embedding was put into its file."""
    own = head.own_embedding
    shared = read_embedding(target).to(head.fc.weight.dtype)
    if own is None or own.shape != shared.shape or not bool((own == shared).all()):
        return head
    bare = Eagle3Head(dataclasses.replace(head.config), head.draft_to_target_V)
    bare.load_state_dict(head.state_dict(), assign=True)
    return bare.eval()
