"""Decoding without waiting: while the device runs a cycle, the host hands out the one before.

Nothing the host does has to be known to the device for the next cycle to be right, so it is started
before the last one is read. What the host learns late costs little: a request that has ended runs
one cycle too many, whose tokens nobody takes. Requests come in through passes of their own
(`SteadyReader`) and leave by their place being cleared, both behind the cycle in flight. Where
memory runs out, or drafting begins, what is in flight is awaited first. For a few cycles without
drafts the head reads along; then it is left behind, and catches up before it drafts again.

Legend: B places of the batch.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

from fledge.contracts.progress import Progress
from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.device_clock import DeviceClock
from fledge.engine.draft_plan import PLAIN, DraftPlan, Load
from fledge.engine.drafter import Drafter
from fledge.engine.graphs import GraphCounts, Graphs
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.engine.steady_bare import BareCycles
from fledge.engine.steady_captures import CapturesAhead
from fledge.engine.steady_cycle import SteadyCycle, runs_ahead
from fledge.engine.steady_flight import (
    Collected,
    Started,
    collect,
    fresh_tokens,
    has_more_to_say,
    member_of,
    read_members,
)
from fledge.engine.steady_places import SteadyPlaces
from fledge.engine.steady_plans import Plans, SteadyPlans
from fledge.engine.steady_reading import Chunk, SteadyReader
from fledge.engine.steady_runs import SteadyRuns
from fledge.engine.steady_sizes import SteadySizes
from fledge.models.target import Target
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.settle import FIRST_TOKEN
from fledge.ops.staging import receive

_MOST_IN_FLIGHT = 4
"""Two cycles, and prompts read behind each."""

_MOST_ALONG = 8
"""Cycles without drafts that the head reads along with, which costs each some percent: together
about what it takes to await a cycle and to catch up. Then the head is left behind."""


class Steady:
    """A batch of requests that only decode, and prompts of those who will join it."""

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        drafter: Drafter,
        settings: EngineSettings,
        wanted: Plans,
        walk: Callable[..., Walk] = walk_gumbel,
    ) -> None:
        self._target, self._cache, self._drafter = target, cache, drafter
        self._settings, self._wanted = settings, wanted
        self._num_levels = settings.tree.depth + 1 if drafter.num_scratch else 1
        self._is_on = runs_ahead(target, drafter, settings, self._num_levels)
        self._graphs = Graphs(target.device)
        self._runs = SteadyRuns(SteadyCycle(target, cache, drafter, walk), self._graphs)
        self._sizes = SteadySizes(self._runs, self._graphs)
        self._reader = SteadyReader(
            target,
            cache,
            drafter,
            walk,
            self._graphs,
            num_levels=self._num_levels,
            max_tokens=settings.max_pass_tokens,
            max_requests=settings.max_requests,
        )
        self.places = SteadyPlaces(
            self._num_levels,
            lambda num_requests, now: self._sizes.pick(
                num_requests, is_drafting=self._is_drafting, now=now
            ),
            spare_row=cache.spare_row,
            device=target.device,
        )
        self.plans = SteadyPlans(
            self._runs,
            self._sizes,
            self._graphs,
            self.places,
            wanted if self._is_on and isinstance(drafter, HeadDrafter) else None,
            max_pass_tokens=settings.max_pass_tokens,
        )
        self.bare = BareCycles(self._runs, self._sizes, self._graphs, drafter)
        self._started = deque[Started]()
        self._is_drafting = self._is_subset = False
        self._begun: DeviceClock | None = None
        self._num_along = 0
        self._num_caught_up: int | None = None

    @property
    def can_capture(self) -> bool:
        """Whether cycles run ahead at all, on a device that captures them."""
        return self._is_on and self._graphs.is_capturing

    def capture_ahead(self, progress: Progress, *, budget_s: float, is_measured: bool) -> int:
        """Capture what is likely to come up; returns how many graphs there are then."""
        captures = CapturesAhead(
            (self._runs, self._reader, self.places, self._graphs),
            self._settings,
            self._wanted if isinstance(self._drafter, HeadDrafter) else None,
            device=self._target.device,
            is_measured=is_measured,
        )
        num_graphs = captures.run(progress, budget_s=budget_s)
        self._graphs.forget_counts()
        return num_graphs

    @property
    def counts(self) -> GraphCounts:
        """How cycles and passes over prompts were run."""
        return self._graphs.counts

    @property
    def is_running(self) -> bool:
        """Whether there is a batch, or something whose outcome was not taken."""
        return bool(self._started) or self.places.num_requests > 0

    @property
    def num_in_flight(self) -> int:
        """Cycles and passes over prompts whose outcome was not taken."""
        return len(self._started)

    @property
    def has_cycle_in_flight(self) -> bool:
        return not all(one.is_reading for one in self._started)

    @property
    def has_prompts_in_flight(self) -> bool:
        return any(one.is_reading for one in self._started)

    def can_run(self, seq: Sequence) -> bool:
        """Whether nothing that it asks for needs the host in the middle of a cycle."""
        if not self._is_on:
            return False
        # One whose drafts made its logits no numbers has a pass without any node below it.
        asks_nothing = seq.request.params.logprobs is None and not seq.is_suspect
        is_free = seq.grammar is None and not seq.rules.is_any and asks_nothing
        return is_free and self._has_positions(seq.len)

    def _has_positions(self, length: int) -> bool:
        """Whether so many tokens stay inside the target's context, however much is in flight."""
        most = length + (_MOST_IN_FLIGHT + 1) * self._num_levels + 1
        return most < self._target.context_len

    def begin(
        self, drafting: Many[Sequence], plain: Many[Sequence], *, is_drafting: bool, is_subset: bool
    ) -> None:
        """Start with these; `is_subset` when fewer are drafted for than could be.

        `is_drafting` says whether those who join are drafted for.
        """
        assert not self._started
        self._is_drafting, self._is_subset = is_drafting, is_subset
        self._begun = DeviceClock(self._target.device)
        self._num_caught_up = self._catch_up(drafting)
        members = [
            *(member_of(seq, is_drafted=True) for seq in drafting),
            *(member_of(seq, is_drafted=False) for seq in plain),
        ]
        self.places.begin(members, [fresh_tokens(member) for member in members])

    def join(self, sequences: Many[Sequence]) -> None:
        """Take in requests of which the host knows everything."""
        if not sequences:
            return
        is_on = self._is_drafting
        members = [member_of(seq, is_drafted=is_on and seq.may_have_drafts) for seq in sequences]
        self._catch_up([member.sequence for member in members if member.is_drafted])
        self.places.join(members, [fresh_tokens(member) for member in members])

    def _catch_up(self, drafted: Many[Sequence]) -> int:
        """Have the head read what a cycle does not: more than one cycle may have said."""
        behind = [seq for seq in drafted if seq.len - seq.head_len > self._num_levels]
        num_unread = sum(seq.len - seq.head_len for seq in behind)
        self._drafter.catch_up(behind)
        return num_unread - sum(seq.len - seq.head_len for seq in behind)

    def goes_on(self, plan: DraftPlan) -> bool:
        """Whether another cycle of this plan can be started for those who are here."""
        if self._is_subset or plan.num_drafted is not None:
            return False
        if plan.is_plain:
            can_read = isinstance(self._drafter, HeadDrafter) and self._num_along < _MOST_ALONG
            self._is_drafting = self._is_drafting and can_read and not self.bare.is_wanted
        elif not self._is_drafting:
            return False
        alive = self.places.sequences
        longest = max((len(seq.token_ids) for seq in alive), default=0)
        return self._has_positions(longest) and self.accepts(alive, is_plain=not self._is_drafting)

    def examine(self) -> None:
        """Draft for those who join from now on: of those who are here the head knows too little."""
        if not self._is_drafting and all(one.plan.is_plain for one in self._started):
            self.places.stop_drafting()
            self._is_drafting, self._num_along = True, 0

    def accepts(self, sequences: Many[Sequence], *, is_plain: bool) -> bool:
        """Room for whatever the next cycle may write; False where there is not enough."""
        ahead = sum(1 if one.plan.is_plain else self._num_levels for one in self._started)
        scratch = 0 if is_plain else max(self._drafter.num_scratch, self._num_levels)
        return self._cache.reserve_behind(sequences, ahead + scratch)

    def start(self, plan: DraftPlan, load: Load) -> None:
        """Ask the device for a cycle."""
        batch = self.places.batch
        assert batch is not None
        clock, num_cold = self._begun or DeviceClock(self._target.device), self._graphs.num_cold
        num_caught_up, self._begun, self._num_caught_up = self._num_caught_up, None, None
        trees = gains = None
        self._num_along = self._num_along + 1 if self._is_drafting and plan.is_plain else 0
        if not plan.is_plain:
            trees = self._runs.draft(batch, plan, self.places.filters)
            gains = receive(self._runs.gains(trees)) if plan.is_measured else None
        elif self._is_drafting:
            self._runs.read_along(batch)
        clock.tick()
        self.bare.verify(batch, trees, self.places, has_head=self._is_drafting)
        facts_XB = receive(batch.facts_XB[: FIRST_TOKEN + 1] if plan.is_plain else batch.facts_XB)
        clock.tick()
        self._started.append(
            Started(
                plan=plan,
                load=replace(load, num_places=batch.size),
                members=self.places.by_place(),
                facts_XB=facts_XB,
                gains=gains,
                clock=clock,
                is_cold=self._graphs.num_cold != num_cold,
                num_caught_up=num_caught_up,
                has_head_read=self._is_drafting,
            )
        )

    def read(self, chunks: Many[Chunk]) -> None:
        """Ask the device for a pass over parts of prompts; those read to their end join."""
        chunks, num_told = self.bare.sort_out(chunks)
        with_head = self._is_drafting and num_told > 0
        self._begun = None  # where no cycle was begun with: the next one is not to pay for this
        if with_head:
            # Kept prefixes may come without the head's entries.
            self._drafter.catch_up([seq for seq, _ in chunks if seq.may_have_drafts])
        clock, num_cold = DeviceClock(self._target.device), self._graphs.num_cold
        clock.tick()
        drafted = [with_head and seq.may_have_drafts for seq, _ in chunks]
        asked = time.perf_counter()
        batch, passed = self._reader.read(chunks, drafted, num_told=num_told)
        asking_s = time.perf_counter() - asked
        facts_XB = receive(batch.facts_XB[: FIRST_TOKEN + 1])
        clock.tick()
        self._reader.tell_head(passed, with_entries=with_head)  # no first token waits for it
        num_tokens = sum(chunk for _, chunk in chunks)
        members = read_members(chunks, drafted, with_head=with_head)
        joining = [i for i, one in enumerate(members) if has_more_to_say(one)]
        if joining:
            self.places.join_from(batch, joining, [one for i in joining if (one := members[i])])
        self._started.append(
            Started(
                plan=PLAIN,
                load=Load(num_requests=0, num_other_tokens=num_tokens),
                members=members,
                facts_XB=facts_XB,
                gains=None,
                clock=clock,
                is_cold=self._graphs.num_cold != num_cold,
                asking_s=asking_s,
                is_reading=True,
            )
        )

    def collect(self) -> Collected:
        """Wait for what was started first and read it."""
        got = collect(self._started.popleft())
        self._sizes.observe(got)
        self._reader.observe(got)
        return got

    def forget(self) -> None:
        """Drop what is in flight: nobody will ask for it."""
        self._started.clear()
        self.places.forget()
