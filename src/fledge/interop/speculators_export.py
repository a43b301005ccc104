"""A head in the format of the speculators library, which vLLM serves as it is."""

from pathlib import Path
from typing import Any

from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.checkpoint_files import write_checkpoint
from fledge.interop.limits import refuse
from fledge.interop.public_tensors import public_tensors
from fledge.interop.serve_commands import chain_of
from fledge.interop.taps import check_ascending, known_taps
from fledge.interop.target_facts import TargetFacts, has_default_taps
from fledge.interop.vllm_export import LAYER_IDS
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.head_dialects import config_to_json

_VERSION = "0.9.0"
_OUTER = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_INNER = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "num_aux_hidden_states",
)


def check_speculators(head: Eagle3Head, target: TargetFacts | None) -> None:
    """Refuse what the library, or vLLM reading its format, would misread."""
    config = head.config
    refuse(
        "speculators",
        (
            (
                config.norm_before_fc and config.fc_norm,
                "norm_before_fc and fc_norm are both set, which it refuses.",
                "Export it for vLLM, which takes both.",
            ),
            (
                config.target_hidden_size != config.hidden_size,
                f"its hidden size {config.hidden_size} is not the target's "
                f"{config.target_hidden_size}, which its fc does not allow.",
                "Export it for vLLM.",
            ),
            (
                config.attention_bias != config.output_bias,
                "its attention has biases on queries, keys and values only, where the library has "
                "one behind attention too.",
                "Export it for vLLM.",
            ),
        ),
    )
    check_ascending(known_taps(config, target), "vLLM, which serves this format,")


def write_speculators(
    head: Eagle3Head, directory: Path, target: TargetFacts | None, tuned: TunedSettings | None
) -> None:
    data = nested_config(head.config, target, tuned)
    data["torch_dtype"] = str(head.fc.weight.dtype).removeprefix("torch.")
    tensors = public_tensors(head, layer="layers.0.")
    if head.config.draft_vocab_size == head.config.vocab_size:
        # The library has no tables for a whole vocabulary and calls them unexpected.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    write_checkpoint(data, tensors, directory)


def nested_config(
    config: HeadConfig, target: TargetFacts | None, tuned: TunedSettings | None
) -> dict[str, Any]:
    flat = config_to_json(config)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": chain_of(tuned),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": None if target is None else target.place,
        "architectures": [] if target is None else list(target.architectures),
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": {key: flat[key] for key in _INNER if key in flat},
        **{key: flat[key] for key in _OUTER},
        "target_hidden_size": None,
        LAYER_IDS: None if has_default_taps(config, target) else list(config.taps or ()),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
