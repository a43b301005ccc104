"""Shape and switches of an EAGLE-3 head, free of any file format."""

from dataclasses import dataclass
from typing import Any

from fledge.contracts.errors import ConfigError, MismatchError

NUM_DEFAULT_TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Everything that decides the head's tensors and how they are used."""

    hidden_size: int
    target_hidden_size: int
    """Hidden size of the target; equals `hidden_size` in nearly every head."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Vocabulary of the target."""

    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Parameters of another rope type than the default, in transformers' words."""

    taps: tuple[int, ...] | None = None
    """Completed target layers the head reads; None means 2, n//2, n-3."""

    num_taps: int = NUM_DEFAULT_TAPS
    attention_bias: bool = False
    """Biases of queries, keys and values."""

    output_bias: bool = False
    """A bias behind attention; checkpoints with biases may have it or not."""

    qk_norm: bool = False
    """RMS norms of each head's queries and keys before rotation, as in Qwen3's layers."""

    sliding_window: int | None = None
    norm_before_residual: bool = False
    """The residual is the normed hidden state (speculators' default) instead of the raw one."""

    norm_before_fc: bool = False
    """One RMS norm over all taps together before `fc`."""

    fc_norm: bool = False
    """EAGLE-3.1: one RMS norm per tap before `fc`."""

    norm_output: bool = False
    """EAGLE-3.1: feed back the normed output instead of the raw one."""

    turned_rows: bool = False
    """Output rows are the target's, turned by a matrix: `fledge.models.turned_rows`."""

    def __post_init__(self) -> None:
        if self.taps is not None and len(self.taps) != self.num_taps:
            raise ConfigError(
                f"the head names {len(self.taps)} tapped layers {list(self.taps)} but is built "
                f"for {self.num_taps}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the head has {self.num_heads} attention heads, which {self.num_kv_heads} "
                "key-value heads do not divide."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"the draft vocabulary has {self.draft_vocab_size} tokens, more than the target's "
                f"{self.vocab_size}."
            )
        if self.turned_rows and self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"the head has turned_rows and a hidden size of {self.hidden_size}, but rows of "
                f"the target have {self.target_hidden_size} numbers; rows that are turned must be "
                "as wide as the head."
            )

    def resolve_taps(self, num_target_layers: int) -> tuple[int, ...]:
        """The tapped layers for a target of this depth."""
        taps = self.taps or default_taps(num_target_layers)
        if len(taps) != self.num_taps:
            raise MismatchError(
                f"the head reads {self.num_taps} target layers but names none, and the default "
                f"layers {list(taps)} are {len(taps)}; name them in its config.json as "
                f"eagle_aux_hidden_state_layer_ids, {self.num_taps} counts of completed layers."
            )
        return taps


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The field's convention: 2, n//2 and n-3 completed layers.

    Targets too shallow for three distinct ones get what is nearest and still inside. Their taps
    repeat and need not ascend: this is the other engines' formula, and heads are trained on it.
    """
    return tuple(min(max(tap, 0), num_layers) for tap in (2, num_layers // 2, num_layers - 3))
