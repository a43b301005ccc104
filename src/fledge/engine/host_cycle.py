"""Cycles on a CPU in a few native calls: one that drafts, one that verifies, one that draws.

Where a cycle needs no more than the token behind each row, no tree or mask is made: the head drafts
chains, the target reads them, and a walk down a chain compares two lists. Everything else (prompts,
rules, grammars, logprobs, trees with branches) takes the ordinary way, between whose cycles these
fit: cache, sequences and results are the same. Nothing is drawn where all requests are greedy.

What the target leaves for the head is fused only when the head is next asked, or when someone else
may look: `leave` hands it over.
"""

import time
from dataclasses import replace
from functools import cache

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.chain_planner import (
    NO_CHAINS,
    AdaptiveChains,
    ChainPlan,
    ChainPlanners,
    FixedChains,
    make_chains,
)
from fledge.engine.chain_walk import walk_chain
from fledge.engine.commits import commit
from fledge.engine.cycle_end import CycleEnd
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.drafter import Drafter, NoDrafter
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.host_drafts import HostDrafted, HostDrafts, draws_of, no_drafts
from fledge.engine.pass_times import PassTimes
from fledge.engine.scheduler import Scheduler
from fledge.engine.sequence import Sequence
from fledge.engine.waiting_features import MOST_WAITING, WaitingFeatures
from fledge.models.native_passes import ChainPasses
from fledge.models.target import Target
from fledge.ops.native_chains import TokenChain


class HostCycle:
    """Cycles that need no more than lists on the host."""

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        drafter: Drafter,
        scheduler: Scheduler,
        end: CycleEnd,
        settings: EngineSettings,
        *,
        is_exact: bool,
        can_sample: bool,
        times: PassTimes | None,
    ) -> None:
        """`is_exact` says whether drafts are accepted as they should be, not by chance;
        `can_sample` whether those are accepted that the target itself would draw; `times` are for
        chains that are as long as they pay."""
        self._target, self._cache, self._drafter = target, cache, drafter
        self._scheduler, self._end, self._settings = scheduler, end, settings
        self._is_on = (
            is_exact
            and target.device.type == "cpu"
            and settings.graphs != "on"
            and isinstance(drafter, HeadDrafter | NoDrafter)
        )
        self._can_sample = can_sample
        self._planners: ChainPlanners | None = None
        if isinstance(drafter, HeadDrafter):
            self._planners = make_chains(settings.tree, times)
            self._is_on &= self._planners is not None
        self._passes: ChainPasses | None = None
        self._drafts: HostDrafts | None = None
        self._served: list[Sequence] = []
        self._is_sampled = False
        self._waiting: WaitingFeatures | None = None

    def runs(self) -> bool:
        """One cycle, where all requests decode and none needs more; else nothing happens."""
        if not self._is_on or self._scheduler.could_admit:
            return False
        running = self._scheduler.running
        if not running or not self._can_serve(running):
            return False
        started = time.perf_counter()
        plan = self._choose(running)
        if not self._has_room(running, plan.depth):
            return False
        made = no_drafts(running) if self._drafts is None else self._drafts.draft(running, plan)
        drafted = time.perf_counter()
        chains = [
            TokenChain(seq.row, seq.kv_len, [seq.token_ids[-1], *below.token_ids])
            for seq, below in zip(running, made.chains, strict=True)
        ]
        assert self._passes is not None
        num_waiting = 0 if self._waiting is None else len(self._waiting.slots)
        draws = draws_of(running) if self._is_sampled else None
        tokens = self._passes.run(chains, draws, features_at=num_waiting)
        verified = time.perf_counter()
        times = (started, drafted, verified)
        self._finish(list(running), chains, tokens, times, plan, made)
        return True

    def leave(self) -> None:
        """Hand over what others may look at."""
        if self._waiting is not None:
            self._waiting.hand_over()

    def forget(self) -> None:
        """What was computed is worth nothing any more."""
        self._served = []
        if self._waiting is not None:
            self._waiting.slots.clear()

    def state(self) -> dict[str, object]:
        return {} if self._planners is None else self._planners.state()

    @property
    def _planner(self) -> FixedChains | AdaptiveChains | None:
        if self._planners is None:
            return None
        return self._planners.sampled if self._is_sampled else self._planners.greedy

    def _can_serve(self, running: list[Sequence]) -> bool:
        served = self._served
        is_known = len(served) == len(running) and all(map(_is_same, served, running))
        if not is_known:
            self._served = []
            if not all(self._asks_little(seq) for seq in running) or not self._prepare():
                return False
            self._served = list(running)
            self._is_sampled = not all(seq.request.params.is_greedy for seq in running)
            is_new = all(len(seq.output_ids) <= 1 for seq in running)
            planner = self._planner
            if is_new and isinstance(planner, AdaptiveChains):
                planner.begin()
        most = self._settings.tree.depth + 2
        context_len = self._target.context_len
        return all(
            seq.is_decoding and not seq.is_suspect and seq.kv_len + most < context_len
            for seq in running
        )

    def _asks_little(self, seq: Sequence) -> bool:
        """Whether the token behind each row is all that the request needs."""
        params = seq.request.params
        is_free = seq.grammar is None and not seq.rules.is_any
        return (params.is_greedy or self._can_sample) and params.logprobs is None and is_free

    def _prepare(self) -> bool:
        """Lay out what the kernels are called with, where there are kernels."""
        native = self._target.chain_native()
        drafter, head = self._drafter, None
        if isinstance(drafter, HeadDrafter):
            head = None if drafter.fast is None else drafter.fast.native
            native = None if head is None else native
        if native is None:
            return False
        if self._drafts is not None:
            self._drafts.native.refresh()
        if self._passes is not None:
            return True
        settings, most = self._settings, self._settings.max_requests
        depth = min(settings.tree.depth, settings.tree.budget)
        tables = self._cache.all_tables
        self._passes = ChainPasses(
            native,
            self._target.embedding,
            self._cache.target_memory,
            tables,
            drafter.taps,
            max_requests=most,
            max_rows=most * (depth + 1),
            num_features=MOST_WAITING + most,
        )
        if head is not None and isinstance(drafter, HeadDrafter):
            self._waiting = WaitingFeatures(self._passes.features_XF, drafter, self._cache)
            self._drafts = HostDrafts(
                drafter,
                head,
                self._cache,
                self._waiting,
                max_requests=most,
                max_depth=depth,
                has_copies=settings.copies,
            )
        return True

    def _choose(self, running: list[Sequence]) -> ChainPlan:
        planner = self._planner
        if planner is None or self._drafts is None:
            return NO_CHAINS
        # What comes behind the last token that may be said is of no use.
        left = max(seq.request.max_new_tokens - len(seq.output_ids) for seq in running) - 1
        if left <= 0 or not any(seq.request.params.speculate for seq in running):
            return NO_CHAINS
        room = self._settings.max_pass_tokens // len(running) - 1
        plan = planner.choose()
        depth = max(0, min(plan.depth, left, room))
        return plan if depth == plan.depth else replace(plan, depth=depth)

    def _has_room(self, running: list[Sequence], depth: int) -> bool:
        return all(self._cache.reserve(seq, seq.len + depth) for seq in running)

    def _finish(
        self,
        running: list[Sequence],
        chains: list[TokenChain],
        tokens: list[int | None],
        times: tuple[float, float, float],
        plan: ChainPlan,
        made: HostDrafted,
    ) -> None:
        started, drafted, verified = times
        said, start = [], 0
        for seq, one in zip(running, made.chains, strict=True):
            stop = start + 1 + len(one.token_ids)
            behind = tokens[start:stop]
            said.append(walk_chain(seq, one.token_ids, behind, is_copied=one.is_copied))
            start = stop
        before = [seq.kv_len for seq in running]
        result = commit(said)
        if self._waiting is not None:
            self._waiting.keep(running, chains, before)
        if any(seq.has_ended for seq in running):
            self.leave()
            self._served = []
        self._end.settle(running, [])
        nodes = start - len(running)
        target_s = verified - drafted
        draft_s = drafted - started if plan.depth else 0.0
        report = CycleReport(
            plan=_chain_plan(plan.depth, nodes) if plan.depth else PLAIN,
            load=_load_of(len(running)),
            target_s=target_s,
            draft_s=draft_s,
            other_s=time.perf_counter() - started - target_s - draft_s,
            emitted=result.num_emitted,
            reached_D=result.reached_at_depth,
            accepted_D=result.accepted_at_depth,
            num_copies_offered=result.num_copies_offered,
            num_copies_accepted=result.num_copies_accepted,
            num_extended=made.num_extended,
        )
        planner = self._planner
        if isinstance(planner, AdaptiveChains):
            self._end.stats.count_cycle(report)
            outcomes = [one.outcome(end) for one, end in zip(made.chains, said, strict=True)]
            planner.observe(report, made.num_levels, outcomes)
        else:
            self._end.report(report)


# The same few come again and again.
@cache
def _chain_plan(depth: int, nodes: int) -> DraftPlan:
    return DraftPlan(depth, 1, nodes)


@cache
def _load_of(num_requests: int) -> Load:
    return Load(num_requests=num_requests)


def _is_same(one: Sequence, other: Sequence) -> bool:
    return one is other
