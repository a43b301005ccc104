"""How many drafts were accepted at each position, counted alike for our engine and for others.

Engines differ in the last cycle of an answer, where drafts may lie behind its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fledge.contracts.outputs import Completion

Counting = Literal["verified", "all_but_last"]
"""`verified`: every draft that the target confirmed, behind the end of an answer too;
`all_but_last`: the last cycle of each answer is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts over the chain drafts of one or several answers."""

    num_drafts: int
    """Cycles with a draft."""

    accepted_at_position: tuple[int, ...]
    """Of those, cycles in which the draft was accepted up to this position at least."""

    counting: Counting

    @property
    def offered_at_position(self) -> tuple[int, ...]:
        """Cycles in which the drafts before this position were accepted."""
        return (self.num_drafts, *self.accepted_at_position)[: len(self.accepted_at_position)]

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Probability that the draft at a position is accepted, given that those before it were."""
        pairs = zip(self.accepted_at_position, self.offered_at_position, strict=True)
        return tuple(accepted / offered if offered else None for accepted, offered in pairs)


def our_acceptance(completions: Sequence[Completion], depth: int, counting: Counting) -> Acceptance:
    """What our engine counted; `all_but_last` needs answers asked for with draft depths."""
    positions = range(depth)
    if counting == "all_but_last":
        per_answer = [_accepted_in_cycles(completion)[:-1] for completion in completions]
        cycles = [accepted for one in per_answer for accepted in one]
        counts = tuple(sum(accepted > place for accepted in cycles) for place in positions)
        return Acceptance(num_drafts=len(cycles), accepted_at_position=counts, counting=counting)
    stats = [completion.stats for completion in completions]
    return Acceptance(
        num_drafts=sum(sum(one.offered_at_depth[:1]) for one in stats),
        accepted_at_position=tuple(
            sum(sum(one.accepted_at_depth[place : place + 1]) for one in stats)
            for place in positions
        ),
        counting=counting,
    )


def _accepted_in_cycles(completion: Completion) -> list[int]:
    """Drafted tokens of each cycle; a depth of 0 is the target's own token, which ends one."""
    depths = completion.draft_depths
    assert depths is not None, "answers must be asked for with draft_depths"
    cycles, accepted = [], 0
    for depth in depths[1:]:  # the first token came with the prompt
        if depth == 0:
            cycles.append(accepted)
            accepted = 0
        else:
            accepted += 1
    return [*cycles, accepted] if accepted else cycles
