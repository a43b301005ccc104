"""Settings of a head that is trained: its shape and switches."""

from dataclasses import dataclass

from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Shape and switches of the head; what is not named here follows the target."""

    mlp_width: int = 0
    """Width of the head's MLP; 0 takes the target's."""

    attention_heads: int = 0
    """Query heads, each as large as the target's and as many to a key-value head; 0 takes as many
    as the target has."""

    draft_vocab_size: int = 0
    """Tokens that are drafted: those said most often in what is learned, sources counted as often
    as `train.sources` says. 0 takes the vocabulary of the corpus, or of the first of several."""

    common_tokens: int = 0
    """Of these, so many that are said most often are all that a CPU drafts, where every row of the
    output matrix takes time; 0 leaves it at all. Needs `draft_vocab_size`."""

    learned_tokens: int = 0
    """Losses see so many of the drafted tokens, those said most often; 0 shows them all. Turned
    rows work for the others too, which then cost no time in training. Needs `turned_rows`."""

    fc_norm: bool = False
    """EAGLE-3.1: one norm per tapped layer before they are fused."""

    norm_output: bool = False
    """EAGLE-3.1: feed back the normed hidden state."""

    norm_before_fc: bool = False
    """One norm over all tapped layers together before they are fused."""

    norm_before_residual: bool = False
    sliding_window: int = 0
    """Tokens that the head looks back; 0 means all of them."""

    rope_theta: float = 0.0
    """Base of the rotation; 0 takes the target's."""

    lm_head_from_target: bool = True
    """Start the head's output rows as copies of the target's."""

    turned_rows: bool = False
    """Output rows are the target's, turned by one matrix that is learned, instead of rows of its
    own: drafted tokens then cost no weights, and a head may draft more of them."""

    def __post_init__(self) -> None:
        if self.turned_rows and not self.lm_head_from_target:
            raise ConfigError(
                "turned_rows is true and lm_head_from_target false, but the rows that are turned "
                "are the target's; leave lm_head_from_target at true."
            )
        check_range("mlp_width", self.mlp_width, 0)
        check_range("attention_heads", self.attention_heads, 0)
        check_range("draft_vocab_size", self.draft_vocab_size, 0)
        check_range("common_tokens", self.common_tokens, 0)
        if self.common_tokens and self.common_tokens >= self.draft_vocab_size:
            raise ConfigError(
                f"common_tokens is {self.common_tokens} and draft_vocab_size "
                f"{self.draft_vocab_size}; the first must be smaller, and counts nothing where the "
                "second is 0."
            )
        self._check_learned_tokens()
        check_range("sliding_window", self.sliding_window, 0)
        check_range("rope_theta", self.rope_theta, 0)

    def _check_learned_tokens(self) -> None:
        check_range("learned_tokens", self.learned_tokens, 0)
        if not self.learned_tokens:
            return
        if not self.turned_rows:
            raise ConfigError(
                f"learned_tokens is {self.learned_tokens} and turned_rows false; rows that no loss "
                "sees would stay copies of the target's. Set turned_rows = true, or learned_tokens "
                "= 0."
            )
        if not self.common_tokens <= self.learned_tokens < self.draft_vocab_size:
            raise ConfigError(
                f"learned_tokens is {self.learned_tokens}, draft_vocab_size "
                f"{self.draft_vocab_size} and common_tokens {self.common_tokens}; it must be "
                "smaller than the first of these and no smaller than the second."
            )
