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

    queue_s: float
    """Seconds from the arrival of the request to the start of its prefill."""

    prefill_s: float
    """Seconds from the start of the prefill to the first token."""

    decode_s: float
    """Seconds from the first token to the last."""

    longest_gap_s: float
    """Longest wait between two passes that yielded tokens."""

    num_prompt_reused: int
    """Prompt tokens whose cache entries were there already."""

    num_preemptions: int
    """How often it had to give up its memory and read its tokens again."""

    offered_at_depth: tuple[int, ...] = ()
    """Cycles in which the drafts before depth i were accepted and one at depth i was offered."""

    accepted_at_depth: tuple[int, ...] = ()
    """Of those, cycles in which a draft at depth i was accepted."""

    num_copies_offered: int = 0
    """Drafts that were copied from the text before, down to the first that was refused."""

    num_copies_accepted: int = 0

    @property
    def time_to_first_token_s(self) -> float:
        return self.queue_s + self.prefill_s

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time between tokens after the first; None when there was only one."""
        return self.decode_s / (self.num_tokens - 1) if self.num_tokens > 1 else None

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

    draft_depths: tuple[int, ...] | None = None
    """Of each token the depth at which it was drafted and accepted, 0 for the target's own; when
    the request asked for them."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine has done since it was made, and how it stands now."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_failed: int
    num_prompt_tokens: int
    """Of finished requests, as are the two below."""

    num_reused_tokens: int
    """Prompt tokens whose cache entries were there already."""

    num_tokens: int
    num_passes: int
    """Target passes."""

    num_request_cycles: int
    """Decode cycles, counted once for each request in them."""

    num_emitted: int
    """Tokens that decode cycles yielded."""

    num_drafts: int
    """Drafted tokens that were verified."""

    num_copies_offered: int
    """Drafts that were copied from the text before, down to the first that was refused."""

    num_copies_accepted: int
    num_preemptions: int
    offered_at_depth: tuple[int, ...]
    accepted_at_depth: tuple[int, ...]
    budgets: dict[int, int]
    """Cycles by the number of drafts in their pass."""

    target_s: float
    draft_s: float
    other_s: float
    """Seconds outside target and head passes."""

    num_replayed: int
    """Halves of cycles, and passes over prompts, that were replayed as captured graphs."""

    num_launched: int
    """The same launched piece by piece although they can be captured."""

    num_captured: int
    """Graphs captured while requests were served."""

    capturing_s: float
    """Seconds of the host for both of these."""

    cache_usage: float
    """Share of the cache memory that running requests hold."""

    num_kept_tokens: int
    """Tokens of ended requests whose entries could be reused."""

    num_evicted_blocks: int
    cache_bytes: int
    head_bytes: int
    """Weights of the head."""

    head_cache_bytes: int
    controller: dict[str, object]
    """What the controller chooses, and why."""

    @property
    def accept_length(self) -> float | None:
        """Tokens per request and decode cycle; None before the first cycle."""
        cycles = self.num_request_cycles
        return self.num_emitted / cycles if cycles else None

    @property
    def acceptance_at_depth(self) -> tuple[float | None, ...]:
        """Probability that the draft at depth i is accepted given that those before it were."""
        pairs = zip(self.accepted_at_depth, self.offered_at_depth, strict=True)
        return tuple(accepted / offered if offered else None for accepted, offered in pairs)
