"""What the engine gives back."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Measures of one request, in the words of docs/glossary.md."""

    num_tokens: int
    """Tokens generated, the ending end-of-text token included."""

    cycles: int
    """Decode cycles; the prefill pass, which yields the first token, is not one."""

    prefill_s: float
    """Seconds from the start of the prefill to the first token."""

    decode_s: float
    """Seconds from the first token to the last."""

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by decode cycles over cycles; None when there was no cycle."""
        return (self.num_tokens - 1) / self.cycles if self.cycles else None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time of the request, prefill included."""
        seconds = self.prefill_s + self.decode_s
        return self.num_tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How probable the target found one token of an answer.

    These are the target's own probabilities, before penalties, logit bias, temperature and filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens with their logprobs, best first, as many as were asked for. The
    token itself is among them only if it is that probable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, when the request asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One piece of a streamed answer; the last one carries the completion."""

    text: str
    """Text that is final: it never ends inside a character or inside a possible stop text."""

    token_ids: tuple[int, ...]
    """Tokens emitted since the last chunk."""

    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of this chunk, when the request asked for them."""
