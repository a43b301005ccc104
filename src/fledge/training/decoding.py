"""Real decoding on held-out prompts while a head is trained: what its curves are worth in serving.

The engine answers greedily with the head drafting a chain, beside the target that training already
holds. It is made once, with memory for its few requests only; each measurement copies the newest
weights into a head of its own, in the target's dtype, so training is not touched.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.engine import Engine
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.target import Target
from fledge.models.turned_rows import target_rows
from fledge.training.metrics import Figure

_MAX_TOGETHER = 16
"""Requests answered at once: more cost memory that training would miss."""


class Said(Protocol):
    """A sample of a corpus or of features."""

    @property
    def token_ids(self) -> Any: ...
    @property
    def loss_mask(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSums:
    """Counts of answered prompts; they add up over prompts and processes."""

    num_emitted: int
    """Tokens that cycles yielded; the first of each answer comes from reading the prompt."""

    num_cycles: int
    offered_at_depth: tuple[int, ...]
    accepted_at_depth: tuple[int, ...]

    def packed(self) -> Tensor:
        """One tensor to be summed over processes."""
        counts = (self.num_emitted, self.num_cycles, *self.offered_at_depth)
        return torch.tensor([*counts, *self.accepted_at_depth], dtype=torch.float64)

    @property
    def accept_length(self) -> float | None:
        return self.num_emitted / self.num_cycles if self.num_cycles else None

    def as_record(self) -> dict[str, Figure]:
        """As curves hold them."""
        pairs = zip(self.accepted_at_depth, self.offered_at_depth, strict=True)
        return {
            "accept_length": self.accept_length,
            "acceptance_at_depth": [a / offered if offered else None for a, offered in pairs],
            "num_cycles": self.num_cycles,
        }


def unpacked_decode(sums: Tensor) -> DecodeSums:
    """The opposite of `DecodeSums.packed`."""
    emitted, cycles, *depths = (round(value) for value in sums.tolist())
    half = len(depths) // 2
    return DecodeSums(
        num_emitted=emitted,
        num_cycles=cycles,
        offered_at_depth=tuple(depths[:half]),
        accepted_at_depth=tuple(depths[half:]),
    )


def sum_completions(completions: Sequence[Completion], depth: int) -> DecodeSums:
    """What answers with drafts of at most `depth` amount to."""

    def totals(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        padded = [(*one, *[0] * (depth - len(one))) for one in counts]
        return tuple(sum(column) for column in zip(*padded, strict=True)) or (0,) * depth

    stats = [completion.stats for completion in completions]
    return DecodeSums(
        num_emitted=sum(one.num_tokens - 1 for one in stats if one.cycles),
        num_cycles=sum(one.cycles for one in stats),
        offered_at_depth=totals(one.offered_at_depth for one in stats),
        accepted_at_depth=totals(one.accepted_at_depth for one in stats),
    )


def choose_prompts(
    samples: Iterable[Said], *, count: int, max_prompt_len: int, seed: int
) -> list[tuple[int, ...]]:
    """Prompts of some samples: what stands before the first token that the target said.

    Different ones, drawn by the seed; samples that begin with the target's words, or whose prompt
    leaves no room for an answer, have none.
    """
    found: dict[tuple[int, ...], None] = {}
    for sample in samples:
        said = [place for place, has_loss in enumerate(sample.loss_mask) if has_loss]
        if said and 0 < said[0] <= max_prompt_len:
            found[tuple(int(token) for token in sample.token_ids[: said[0]])] = None
    prompts = list(found)
    random.Random(seed).shuffle(prompts)
    return prompts[:count]


class HeldOutDecoder:
    """Answers the same prompts again and again, each time with newer weights."""

    def __init__(
        self,
        target: Target,
        config: HeadConfig,
        draft_to_target_V: Tensor,
        prompts: Sequence[tuple[int, ...]],
        *,
        depth: int,
        max_tokens: int,
        own_embedding: Tensor | None = None,
    ) -> None:
        """`depth` is that of the drafted chain, `max_tokens` the longest answer."""
        self._prompts = list(prompts)
        self._depth = depth
        self._params = SamplingParams(max_tokens=max_tokens)
        head = Eagle3Head(config, draft_to_target_V, own_embedding)
        # The engine's head has rows of its own, made anew of every matrix that turns them.
        self._turned, self._rows_VD = None, None
        if config.turned_rows:
            self._turned, self._rows_VD = head, target_rows(target.readout, draft_to_target_V)
            head = head.with_own_rows(self._rows_VD)
        self._head = head.to(device=target.device, dtype=target.dtype).requires_grad_(False).eval()
        together = max(1, min(len(self._prompts), _MAX_TOGETHER))
        longest = max((len(prompt) for prompt in self._prompts), default=1)
        block_size = EngineSettings().block_size
        # A block more than a request can fill: drafts begin wherever the last block ends.
        blocks = -(-(longest + max_tokens + depth) // block_size) + 1
        settings = EngineSettings(
            tree=TreeSettings(depth=depth, width=1, budget=depth),
            controller="fixed",
            # What is copied would be the same with any head.
            copies=False,
            max_requests=together,
            cache_tokens=together * blocks * block_size,
            # What older weights left in the head's memory must not meet newer ones.
            share_prefixes=False,
        )
        self._engine = Engine(target, self._head, settings)

    @torch.no_grad()
    def measure(self, weights: Mapping[str, Tensor]) -> DecodeSums:
        """Greedy answers with these weights of the head (a `state_dict`, whole, of any dtype)."""
        if self._turned is not None and self._rows_VD is not None:
            self._turned.load_state_dict(dict(weights), strict=True)
            weights = self._turned.with_own_rows(self._rows_VD).state_dict()
        self._head.load_state_dict(dict(weights), strict=True)
        return sum_completions(self._engine.generate(self._prompts, self._params), self._depth)
