"""Decoding without waiting: while the device runs a cycle, the host hands out the one before.

As long as the same requests decode, nothing the host does has to be known to the device, and the
next cycle is started before the last one is read. What the host learns late costs little: a request
that has ended runs one cycle too many, whose tokens nobody takes. Where somebody joins, memory runs
out, or drafting begins or stops, what is in flight is awaited first.

Legend: B places of the batch.
"""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.commits import Said
from fledge.engine.device_clock import DeviceClock
from fledge.engine.draft_gains import NODE_GRID
from fledge.engine.draft_plan import PLAIN, DraftPlan, Load
from fledge.engine.drafter import Drafter, NoDrafter
from fledge.engine.graphs import Graphs
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import Place, SteadyBatch, batch_size, filters_of
from fledge.engine.steady_cycle import SteadyCycle
from fledge.models.target import Target
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.staging import receive
from fledge.ops.tree import TreeBatch

_MOST_IN_FLIGHT = 2


@dataclass(slots=True)
class Started:
    """A cycle that the device was asked for."""

    plan: DraftPlan
    load: Load
    sequences: list[Sequence | None]
    """Who was in each place when it was started."""

    facts_XB: Tensor
    gains: Tensor | None
    clock: DeviceClock
    is_cold: bool
    """Whether something of it was compiled or captured."""

    num_caught_up: int
    """Tokens that heads read before it began."""


class _Trees(NamedTuple):
    """Trees of a cycle, and the graph that leaves them in the same place every time."""

    batch: TreeBatch
    graph: int | None


@dataclass(frozen=True, slots=True)
class Collected:
    """What a cycle yielded, on the host."""

    plan: DraftPlan
    load: Load
    said: dict[int, Said]
    """By place, of those who are still there."""

    gains: Tensor | None
    is_cold: bool
    num_caught_up: int
    draft_s: float
    target_s: float


class Steady:
    """Batches of requests that only decode."""

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        drafter: Drafter,
        settings: EngineSettings,
        walk: Callable[..., Walk] = walk_gumbel,
    ) -> None:
        self._target, self._cache, self._drafter = target, cache, drafter
        self._settings = settings
        self._num_levels = settings.tree.depth + 1 if drafter.num_scratch else 1
        is_known = isinstance(drafter, HeadDrafter | NoDrafter) and settings.accept == "gumbel"
        # A head reads all that a cycle has said, and its window must not have let go of any of it.
        is_known = is_known and (drafter.window is None or drafter.window >= self._num_levels)
        wanted = target.device.type == "cuda" if settings.graphs == "auto" else None
        self._is_on = is_known and (wanted if wanted is not None else settings.graphs == "on")
        self._cycle = SteadyCycle(target, cache, drafter, walk)
        self._graphs = Graphs(target.device)
        self._batches: dict[int, SteadyBatch] = {}
        self._started = deque[Started]()
        self._batch: SteadyBatch | None = None
        self._sequences: list[Sequence | None] = []
        self._drafted: list[bool] = []
        self._filters, self._is_subset = filters_of([]), False
        self._begun: DeviceClock | None = None
        self._num_caught_up = 0

    @property
    def is_running(self) -> bool:
        """Whether there are cycles whose outcome was not taken."""
        return bool(self._started)

    @property
    def num_requests(self) -> int:
        """Requests in the batch that have not left."""
        return sum(seq is not None for seq in self._sequences)

    def plan_for(self, plan: DraftPlan, num_requests: int) -> DraftPlan:
        """About the same plan for all places: few numbers of nodes, so that few are captured."""
        size = batch_size(num_requests)
        room = self._settings.max_pass_tokens - size
        could_draft = any(seq is not None and seq.may_have_drafts for seq in self._sequences)
        if plan.is_plain or room < 1 or not could_draft:
            return PLAIN
        each = plan.nodes / num_requests
        if plan.nodes % num_requests:
            each = min(NODE_GRID, key=lambda step: abs(math.log(step / each)))
        return replace(plan, nodes=min(max(1, round(each * size)), room))

    def accepts(self, sequences: Many[Sequence], *, is_plain: bool) -> bool:
        """Whether cycles of these requests can run ahead of the host, and have room to."""
        can_run = bool(sequences) and all(map(self.can_run, sequences))
        return can_run and self._reserve(sequences, is_plain=is_plain)

    def holds(self, seq: Sequence) -> bool:
        """Whether it has a place in the batch."""
        return any(one is seq for one in self._sequences)

    def can_run(self, seq: Sequence) -> bool:
        """Whether nothing that it asks for needs the host in the middle of a cycle."""
        if not self._is_on:
            return False
        # One whose drafts made its logits no numbers has a pass without any node below it.
        asks_nothing = seq.request.params.logprobs is None and not seq.is_suspect
        is_free = seq.grammar is None and not seq.rules.is_any and asks_nothing
        return is_free and self._has_positions(seq)

    def _has_positions(self, seq: Sequence) -> bool:
        """Whether it stays inside the target's context however much is said in flight."""
        most = seq.len + (_MOST_IN_FLIGHT + 1) * self._num_levels + 1
        return most < self._target.context_len

    def begin(self, drafting: Many[Sequence], plain: Many[Sequence], *, is_subset: bool) -> None:
        """Take requests in; `is_subset` when fewer are drafted for than could be."""
        assert not self._started
        # A cycle has its head read what one cycle may have said, and no more. The rest is read
        # here, and is part of what the first cycle costs.
        self._begun = DeviceClock(self._target.device)
        behind = [seq for seq in drafting if seq.len - seq.head_len > self._num_levels]
        num_unread = sum(seq.len - seq.head_len for seq in behind)
        self._drafter.catch_up(behind)
        self._num_caught_up = num_unread - sum(seq.len - seq.head_len for seq in behind)
        self._is_subset = is_subset
        places = [
            *(Place(seq, is_drafted=True) for seq in drafting),
            *(Place(seq, is_drafted=False) for seq in plain),
        ]
        size = batch_size(len(places))
        if size not in self._batches:
            self._batches[size] = SteadyBatch(
                size,
                self._num_levels,
                spare_row=self._cache.spare_row,
                device=self._target.device,
            )
        self._batch = self._batches[size]
        self._batch.fill(places)
        self._sequences = [place.sequence for place in places]
        self._drafted = [place.is_drafted for place in places]
        self._filters = filters_of([place.sequence for place in places])

    def goes_on(self, plan: DraftPlan) -> bool:
        """Whether another cycle of this plan can be started for the same requests."""
        assert self._batch is not None
        alive = [seq for seq in self._sequences if seq is not None]
        if not alive or batch_size(len(alive)) != self._batch.size:
            return False
        if self._is_subset or plan.num_drafted is not None:
            return False
        if self._started[-1].plan.is_plain != plan.is_plain:
            return False
        is_plain = plan.is_plain
        return all(map(self._has_positions, alive)) and self._reserve(alive, is_plain=is_plain)

    def _reserve(self, sequences: Many[Sequence], *, is_plain: bool) -> bool:
        """Room for whatever the next cycle may write; False where there is not enough."""
        if is_plain:  # a token each, and so do those in flight: plans of one kind follow each other
            most = len(self._started)
        else:
            ahead = len(self._started) * self._num_levels
            most = ahead + max(self._drafter.num_scratch, self._num_levels)
        return all(self._cache.reserve(seq, seq.len + most) for seq in sequences)

    def start(self, plan: DraftPlan, load: Load) -> None:
        """Ask the device for a cycle."""
        batch = self._batch
        assert batch is not None
        clock, num_cold = self._begun or DeviceClock(self._target.device), self._graphs.num_cold
        num_caught_up, self._begun, self._num_caught_up = self._num_caught_up, None, 0
        trees, gains = self._draft(batch, plan)
        clock.tick()
        self._verify(batch, plan, trees)
        facts_XB = receive(batch.facts_XB)
        host_gains = None if gains is None else receive(gains)
        clock.tick()
        self._started.append(
            Started(
                plan=plan,
                load=load,
                sequences=list(self._sequences),
                facts_XB=facts_XB,
                gains=host_gains,
                clock=clock,
                is_cold=self._graphs.num_cold != num_cold,
                num_caught_up=num_caught_up,
            )
        )

    def _draft(self, batch: SteadyBatch, plan: DraftPlan) -> tuple[_Trees | None, Tensor | None]:
        if plan.is_plain:
            return None, None
        kind = ("draft", batch.size, plan.depth, plan.width, plan.nodes, plan.is_measured)
        (trees, gains), number = self._graphs.run(kind, lambda: self._cycle.draft(batch, plan))
        return _Trees(trees, number), gains

    def _verify(self, batch: SteadyBatch, plan: DraftPlan, trees: _Trees | None) -> None:
        filters = self._filters

        def verify() -> None:
            batch_trees = None if trees is None else trees.batch
            self._cycle.verify(batch, batch_trees, filters)

        if trees is not None and trees.graph is None:
            verify()  # of trees that lie where none will lie again
            return
        graph = None if trees is None else trees.graph
        self._graphs.run(("verify", batch.size, graph, filters), verify)

    def collect(self) -> Collected:
        """Wait for the oldest cycle and read it."""
        one = self._started.popleft()
        draft_s, target_s = one.clock.wait()
        lengths, offered, failed, *levels = one.facts_XB.tolist()
        said = {
            place: Said(
                sequence=seq,
                tokens=[level[place] for level in levels[: lengths[place]]],
                num_offered=offered[place],
                has_failed=bool(failed[place]),
                had_drafts=self._drafted[place] and not one.plan.is_plain,
                had_nodes=not one.plan.is_plain,
            )
            for place, seq in enumerate(one.sequences)
            # Whoever left since is served elsewhere, or not at all.
            if seq is not None and self._sequences[place] is seq
        }
        return Collected(
            plan=one.plan,
            load=one.load,
            said=said,
            gains=one.gains,
            is_cold=one.is_cold,
            num_caught_up=one.num_caught_up,
            draft_s=draft_s,
            target_s=target_s,
        )

    def leave(self, place: int) -> None:
        """The request in this place has ended, or must go another way."""
        self._sequences[place] = None
        if self._batch is not None:
            self._batch.clear(place)

    def drop_left(self) -> None:
        """Requests that were taken away since the last cycle leave their places."""
        for place, seq in enumerate(self._sequences):
            if seq is not None and (seq.row < 0 or seq.has_ended):
                self.leave(place)

    def forget(self) -> None:
        """Drop what is in flight: nobody will ask for it."""
        self._started.clear()
        self._sequences, self._drafted, self._batch = [], [], None
