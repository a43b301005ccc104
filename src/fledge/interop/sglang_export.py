"""A head for SGLang: the same files as for vLLM, with layer ids in SGLang's own counting."""

from pathlib import Path

from fledge.contracts.errors import MismatchError
from fledge.interop.checkpoint_files import write_checkpoint
from fledge.interop.limits import (
    bias_limit,
    qk_norm_limit,
    refuse,
    residual_limit,
    skipped_fc_limit,
)
from fledge.interop.public_tensors import public_tensors
from fledge.interop.sglang_layers import written_ids
from fledge.interop.taps import check_ascending, known_taps
from fledge.interop.target_facts import TargetFacts
from fledge.interop.vllm_export import LAYER_IDS, flat_config
from fledge.models.head import Eagle3Head


def check_sglang(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what SGLang would misread without a word."""
    config = head.config
    limits = (residual_limit, bias_limit, qk_norm_limit, skipped_fc_limit)
    refuse("SGLang", (limit(config, "SGLang") for limit in limits))
    check_ascending(known_taps(config, target), "SGLang")
    written_ids(config.taps, target)
    if head.own_embedding is not None and config.target_hidden_size == config.hidden_size:
        raise MismatchError(
            "SGLang cannot run this head: it brings its own embedding, and SGLang puts the "
            "target's in its place. Export it for vLLM, which keeps it."
        )


def write_sglang(head: Eagle3Head, directory: Path, target: TargetFacts | None) -> None:
    data = flat_config(head, target)
    ids = written_ids(head.config.taps, target)
    data["eagle_config"].pop(LAYER_IDS, None)
    if ids is not None:
        data["eagle_config"][LAYER_IDS] = list(ids)
    write_checkpoint(data, public_tensors(head), directory)
