"""Settings of the stage tokenize."""

from dataclasses import dataclass, field

from fledge.contracts.data_settings import BadRows, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeSettings:
    """From answers to token ids with a loss mask."""

    max_tokens: int = 2048
    """Longer samples are cut at the end."""

    draft_vocab_size: int = 8192
    """Tokens the head may draft: the most frequent ones among those with loss."""

    vocabulary_weights: dict[str, int] = field(default_factory=dict)
    """How often a token of a source counts when these are chosen; 1 where a source is not named."""

    keep_loops: bool = False
    """Keep all of an answer that goes round in circles; otherwise it ends soon after they begin."""

    shard_tokens: int = 4_000_000
    """Tokens per file of the corpus."""

    as_recorded: bool = False
    """Loss on every assistant's turn as it was recorded, whoever wrote it."""

    on_refused: BadRows = "skip"
    """Rows that the target's chat template does not take."""

    on_unclear: BadRows = "stop"
    """Rows in which what the target said cannot be told from what the template wrote."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "draft_vocab_size", "shard_tokens"):
            check_range(name, getattr(self, name), 8)
        for source, weight in self.vocabulary_weights.items():
            check_range(f"vocabulary_weights.{source}", weight, 0, 1000)
