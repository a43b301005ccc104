"""What the engine and its controller tell each other: the load, a plan for it, what it yielded.

A report may come one or more cycles after its pass was started: nothing waits for the device. It
therefore carries the plan and the load it speaks of.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How much is drafted in the next cycle."""

    depth: int
    """Levels of the trees; 0 is plain decoding."""

    width: int
    """Children kept per node, and nodes expanded per level."""

    nodes: int
    """Drafted nodes in the verify pass, over all requests together."""

    num_drafted: int | None = None
    """Requests that get drafts: those with the fewest tokens unread by the head; None for all."""

    is_measured: bool = False
    """Whether the report of this cycle is to carry the gains of its candidates."""

    is_probe: bool = False
    """Whether the cycle is run to learn something, not because it is thought best."""

    @property
    def is_plain(self) -> bool:
        return self.depth == 0

    @property
    def most_unread(self) -> int:
        """Tokens of a request that cycles of this plan leave for the head to read, with one to
        spare."""
        return self.depth + 2

    def shown(self) -> dict[str, int]:
        """For the statistics."""
        return {"depth": self.depth, "width": self.width, "nodes": self.nodes}


PLAIN = DraftPlan(depth=0, width=0, nodes=0)


@dataclass(frozen=True, slots=True)
class Menu:
    """Plans that cycles running ahead are captured for, or would be: any other is not worth it."""

    drafting: tuple[DraftPlan, ...]
    """For all places of the batch, the shallower first."""

    ready: frozenset[DraftPlan]
    """Those whose cycles can be replayed now."""

    capture_s: float
    """What it takes to have another one ready."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the next pass has to carry whatever is drafted."""

    num_requests: int
    """Requests that decode in this pass."""

    num_other_tokens: int = 0
    """Prompt tokens that ride in the same pass."""

    context_tokens: int = 0
    """Cached tokens of the decoding requests, summed."""

    unread: tuple[int, ...] = ()
    """Committed tokens the head has yet to read before it can draft, for each decoding request that
    drafts are wanted for."""

    tokens_left: int | None = None
    """What the decoding requests may say yet, at most and summed; None where nobody asks."""

    num_lacking: int = 0
    """Of the requests, those that came while the head slept."""

    num_places: int = 0
    """Of the batch that runs ahead: those that nobody has are paid for too. 0 without one."""

    menu: Menu | None = None
    """What may be planned; None for anything."""

    @property
    def num_rows(self) -> int:
        """Rows of a pass without drafts and prompts."""
        return max(self.num_places, self.num_requests)


@dataclass(frozen=True, slots=True)
class CycleReport:
    """What one cycle took and yielded; the three times add up to its wall time."""

    plan: DraftPlan
    load: Load
    target_s: float
    """The verify pass: target, acceptance, compaction."""

    draft_s: float
    """All head passes of the cycle, catching up included."""

    other_s: float
    """Everything else, such as scheduling."""

    emitted: int
    """Tokens emitted by the decoding requests."""

    reached_D: tuple[int, ...] = ()
    """Walks that reached a node at depth d - 1 that had children, for d = 1, 2, ..."""

    accepted_D: tuple[int, ...] = ()
    """Of them, those that went on to depth d."""

    num_copies_offered: int = 0
    num_copies_accepted: int = 0
    """Drafts that were copied: down to the first that was refused, and those before it."""

    num_extended: int = 0
    """Committed tokens the head read in this cycle; many after plain decoding."""

    num_just_said: int = 0
    """Of them, those that a captured cycle right before said, which may have had a deeper plan."""

    gains: Tensor | None = None
    """`expected_gains` of the candidates, on the host, if the plan asked for it."""

    is_calibrated: bool = True
    """Whether scores have been compared with what is accepted, and gains can be believed."""

    is_cold: bool = False
    """Whether its times are those of compiling and capturing, and say nothing of later cycles."""

    @property
    def num_drafted(self) -> int:
        """Requests that had drafts."""
        if self.plan.is_plain:
            return 0
        everyone = self.load.num_requests
        return everyone if self.plan.num_drafted is None else self.plan.num_drafted

    @property
    def is_catching_up(self) -> bool:
        """Whether the head read more than cycles with drafts leave unread."""
        most = self.num_drafted * self.plan.most_unread
        return not self.plan.is_plain and self.num_extended - self.num_just_said > most

    @property
    def cycle_s(self) -> float:
        return self.target_s + self.draft_s + self.other_s


class Controller(Protocol):
    """Decides before every cycle how much to draft, and is told what came of it."""

    def choose(self, load: Load) -> DraftPlan:
        """The plan for a cycle with this load."""

    def plans(self, num_places: int) -> tuple[DraftPlan, ...]:
        """Drafting plans that it may come to want for a batch of so many, the shallower first."""

    @property
    def expects_drafts(self) -> bool:
        """Whether requests that come now are likely to be drafted for."""

    @property
    def is_asleep(self) -> bool:
        """Whether nothing is drafted, and nothing need be kept for the head, for some time."""

    @property
    def is_exam(self) -> bool:
        """Whether requests that come are drafted for to see if the head is of use again."""

    def meets_requests(self, *, has_room: bool) -> bool:
        """Requests come; whether they are to be told to the head. `has_room` says whether there is
        memory for drafts."""

    def observe(self, report: CycleReport) -> None:
        """A cycle has ended."""

    def state(self) -> dict[str, object]:
        """What it is doing and why, for the statistics; plain JSON values."""
