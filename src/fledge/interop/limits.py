"""What an engine cannot express, said as a refusal with the nearest thing that works."""

from collections.abc import Iterable

from fledge.contracts.errors import MismatchError
from fledge.models.head_config import HeadConfig

Limit = tuple[bool, str, str]
"""Whether the head has it, what it is, and what to do instead."""


def refuse(engine: str, limits: Iterable[Limit]) -> None:
    """Refuse a head that an engine would load and compute wrongly."""
    for is_there, what, remedy in limits:
        if is_there:
            raise MismatchError(f"{engine} cannot run this head: {what} {remedy}")


def residual_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.norm_before_residual,
        f"norm_before_residual is true (the residual is the normed hidden state), which {engine} "
        "does not know and would ignore.",
        "Export it for vLLM or speculators, or train with head.norm_before_residual = false.",
    )


def fused_norm_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.norm_before_fc,
        f"norm_before_fc is true (one norm over all target states before fc), which {engine} does "
        "not know and would leave out.",
        "Export it for vLLM, SGLang or as GGUF, or train with head.norm_before_fc = false.",
    )


def bias_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.attention_bias or config.output_bias,
        f"its attention has biases, which {engine} would leave out.",
        "Export it for vLLM.",
    )


def qk_norm_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.qk_norm,
        f"its queries and keys are normed (a Qwen3 layer), which {engine} would leave out.",
        "Export it for vLLM or speculators.",
    )


def window_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.sliding_window is not None,
        f"its layer has a sliding window of {config.sliding_window}, which {engine} has not.",
        "Export it for vLLM or speculators, or train without head.sliding_window.",
    )


def tap_norm_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.fc_norm or config.norm_output,
        f"it has the norms of EAGLE-3.1 (fc_norm {config.fc_norm}, norm_output "
        f"{config.norm_output}), which {engine} has not.",
        "Export it for vLLM or SGLang, or train without them.",
    )


def skipped_fc_limit(config: HeadConfig, engine: str) -> Limit:
    width = config.num_taps * config.target_hidden_size
    return (
        width == config.hidden_size,
        f"its {config.num_taps} target states of {config.target_hidden_size} values are as wide as "
        f"its own hidden state, and {engine} then takes them for one and leaves fc out.",
        "Export it for vLLM, or train it on more layers (capture.layers).",
    )


def num_taps_limit(config: HeadConfig, engine: str) -> Limit:
    return (
        config.num_taps != 3,
        f"it reads {config.num_taps} target layers, and {engine} hands over 3.",
        "Export it for vLLM or SGLang, or train it on 3 layers.",
    )
