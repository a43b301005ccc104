"""A head for SafeAILab's EAGLE: its keys and no others, since some of them change what it does."""

from pathlib import Path

from fledge.contracts.errors import MismatchError
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
from fledge.interop.public_tensors import public_tensors
from fledge.interop.taps import check_ascending, known_taps
from fledge.interop.target_facts import TargetFacts, has_default_taps
from fledge.models.head import Eagle3Head
from fledge.models.head_dialects import config_to_json

_KEYS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "draft_vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
)


def check_eagle(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what EAGLE's own code would misread."""
    config, engine = head.config, "EAGLE's own code"
    limits = (
        residual_limit,
        fused_norm_limit,
        bias_limit,
        qk_norm_limit,
        window_limit,
        tap_norm_limit,
        num_taps_limit,
    )
    refuse(engine, (limit(config, engine) for limit in limits))
    size = config.num_heads * config.head_dim
    refuse(
        engine,
        (
            (
                size != config.hidden_size,
                f"{config.num_heads} heads of {config.head_dim} make {size}, not the hidden size "
                f"{config.hidden_size}.",
                "Export it for vLLM or SGLang.",
            ),
            (
                config.rope_scaling is not None,
                f"its rotation is scaled ({config.rope_scaling}), which is read in other words.",
                "Export it for vLLM or SGLang.",
            ),
        ),
    )
    if not has_default_taps(config, target):
        hint = "" if target else " If these are the default of its target, name it with --target."
        raise MismatchError(
            f"{engine} hands over the states after 2, n//2 and n-3 completed layers and cannot be "
            f"told otherwise; this head reads {list(config.taps or ())}. Export it for vLLM or "
            f"SGLang.{hint}"
        )
    check_ascending(known_taps(config, target), engine)


def write_eagle(head: Eagle3Head, directory: Path, target: TargetFacts | None) -> None:
    flat = config_to_json(head.config)
    data = {key: flat[key] for key in _KEYS} | {"bias": False, "pretraining_tp": 1}
    if head.config.target_hidden_size != head.config.hidden_size:
        # With this key EAGLE does not load the target's embedding; such heads bring their own.
        data["target_hidden_size"] = head.config.target_hidden_size
    write_checkpoint(data, public_tensors(head), directory)
