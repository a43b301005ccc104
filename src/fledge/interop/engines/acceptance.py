"""How many drafts were accepted at each position, counted alike for our engine and for others.

Engines differ in the last cycle of an answer. Some count every draft that the target confirmed,
others only what became part of the answer before its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fledge.contracts.outputs import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts over the chain drafts of one or several answers."""

    num_drafts: int
    """Cycles with a draft."""

    accepted_at_position: tuple[int, ...]
    """Of those, cycles in which the draft was accepted up to this position at least."""

    counts_emitted_only: bool
    """Whether drafts behind the end of an answer are left out."""

    @property
    def offered_at_position(self) -> tuple[int, ...]:
        """Cycles in which the drafts before this position were accepted."""
        return (self.num_drafts, *self.accepted_at_position)[: len(self.accepted_at_position)]

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Probability that the draft at a position is accepted, given that those before it were."""
        pairs = zip(self.accepted_at_position, self.offered_at_position, strict=True)
        return tuple(accepted / offered if offered else None for accepted, offered in pairs)


def our_acceptance(
    completions: Sequence[Completion], depth: int, *, counts_emitted_only: bool
) -> Acceptance:
    """What our engine counted; emitted drafts only where answers were asked for draft depths."""
    if counts_emitted_only:
        sizes = [size for completion in completions for size in _cycle_sizes(completion)]
        return Acceptance(
            num_drafts=len(sizes),
            accepted_at_position=tuple(
                sum(size > position + 1 for size in sizes) for position in range(depth)
            ),
            counts_emitted_only=True,
        )
    stats = [completion.stats for completion in completions]
    return Acceptance(
        num_drafts=sum(sum(one.offered_at_depth[:1]) for one in stats),
        accepted_at_position=tuple(
            sum(sum(one.accepted_at_depth[place : place + 1]) for one in stats)
            for place in range(depth)
        ),
        counts_emitted_only=False,
    )


def _cycle_sizes(completion: Completion) -> list[int]:
    """Tokens of each cycle; a depth of 0 is the target's own token, which ends one."""
    depths = completion.draft_depths
    assert depths is not None, "answers must be asked for with draft_depths"
    sizes, size = [], 0
    for depth in depths[1:]:  # the first token came with the prompt
        size += 1
        if depth == 0:
            sizes.append(size)
            size = 0
    return [*sizes, size] if size else sizes
