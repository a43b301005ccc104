"""A new head for a target: its shape from the target's config, its first weights.

Nothing but the config is needed for the shape. The output rows begin as the target's own, so that
the head starts from what its outputs should mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError
from fledge.contracts.head_settings import HeadSettings
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.target_reading import Readout
from fledge.models.turned_rows import TurnedRows, target_rows

_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")


def shape_head(
    config: Any, settings: HeadSettings, *, taps: Sequence[int], draft_vocab_size: int
) -> HeadConfig:
    """The head of a target with this (text) config; what the settings leave open follows it."""
    hidden_size, num_heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(
            f"the target's attention heads have {head_dim} numbers each; a head rotates pairs of "
            "them and needs an even number."
        )
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    if settings.attention_heads:
        num_heads, num_kv_heads = _in_proportion(settings.attention_heads, num_heads, num_kv_heads)
    rope = _rope_parameters(config)
    return HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        intermediate_size=settings.mlp_width or _mlp_width(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config.vocab_size),
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=_eps(config),
        max_position_embeddings=int(config.max_position_embeddings),
        rope_theta=settings.rope_theta or float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_scaling(rope),
        taps=tuple(taps),
        num_taps=len(taps),
        sliding_window=settings.sliding_window or None,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        turned_rows=settings.turned_rows,
    )


def make_head(
    config: HeadConfig, draft_ids: NDArray[Any], *, seed: int, readout: Readout | None
) -> Eagle3Head:
    """A head on the CPU in float32; with a readout its output rows are the target's.

    They are copies that learn, or rows that only the matrix before them turns.
    """
    # A generator of its own: who trains in a larger program keeps the random numbers they had.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, torch.from_numpy(draft_ids.copy()).long())
    if readout is not None:
        rows_VD = target_rows(readout, head.draft_to_target_V)
        if isinstance(head.lm_head, TurnedRows):
            head.lm_head.rows_VD = rows_VD
        else:
            with torch.no_grad():
                head.lm_head.weight.copy_(rows_VD)
    return head.train()


def count_weights(config: HeadConfig) -> int:
    """Numbers in a head of this shape."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Eagle3Head(config).parameters())


def _in_proportion(asked: int, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """So many query heads, and key-value heads that as many share as in the target."""
    group = num_heads // num_kv_heads
    if asked % group:
        raise ConfigError(
            f"attention_heads is {asked}, and {group} query heads of the target share a key-value "
            f"head ({num_heads} have {num_kv_heads}); give a multiple of {group}, or 0 for the "
            f"target's {num_heads}."
        )
    return asked, asked // group


def _mlp_width(config: Any) -> int:
    width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
    return int(width or 4 * config.hidden_size)


def _eps(config: Any) -> float:
    found = (getattr(config, name, None) for name in _EPS_NAMES)
    return float(next((eps for eps in found if eps is not None), 1e-5))


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    """Those of full attention where a target has several."""
    found = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in found:
        found = found["full_attention"]
    return dict(found)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name != "rope_theta"}
