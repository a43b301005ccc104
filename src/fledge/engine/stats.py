"""Counters of an engine: what it served, how drafting went, how the memory stands."""

from fledge.contracts.outputs import EngineStats
from fledge.engine.cache import PagedCache
from fledge.engine.draft_plan import CycleReport
from fledge.engine.drafter import Drafter
from fledge.engine.graphs import GraphCounts
from fledge.engine.scheduler import Scheduler
from fledge.engine.sequence import Sequence


class StatsKeeper:
    """Adds up cycles and requests."""

    def __init__(self) -> None:
        self.num_cycles = 0
        self._num_finished = self._num_failed = 0
        self._num_prompt_tokens = self._num_reused_tokens = 0
        self._num_tokens = self._num_emitted = self._num_request_cycles = self._num_drafts = 0
        self._copies_offered = self._copies_accepted = 0
        self._target_s = self._draft_s = self._other_s = 0.0
        self._offered: list[int] = []
        self._accepted: list[int] = []
        self._budgets: dict[int, int] = {}

    def count_cycle(self, report: CycleReport) -> None:
        self.num_cycles += 1
        self._num_emitted += report.emitted
        self._num_request_cycles += report.load.num_requests
        self._num_drafts += report.plan.nodes
        self._copies_offered += report.num_copies_offered
        self._copies_accepted += report.num_copies_accepted
        self._target_s += report.target_s
        self._draft_s += report.draft_s
        self._other_s += report.other_s
        if report.load.num_requests:
            self._budgets[report.plan.nodes] = self._budgets.get(report.plan.nodes, 0) + 1
        missing = len(report.reached_D) - len(self._offered)
        self._offered += [0] * missing
        self._accepted += [0] * missing
        for depth, (offered, accepted) in enumerate(
            zip(report.reached_D, report.accepted_D, strict=True)
        ):
            self._offered[depth] += offered
            self._accepted[depth] += accepted

    def count_ended(self, seq: Sequence) -> None:
        if seq.error is not None:
            self._num_failed += 1
            return
        self._num_finished += 1
        self._num_tokens += len(seq.output_ids)
        self._num_prompt_tokens += len(seq.request.prompt_token_ids)
        self._num_reused_tokens += seq.num_prompt_reused

    def report(
        self,
        scheduler: Scheduler,
        cache: PagedCache,
        drafter: Drafter,
        controller: dict[str, object],
        graphs: GraphCounts,
    ) -> EngineStats:
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
            num_tokens=self._num_tokens,
            num_passes=self.num_cycles,
            num_request_cycles=self._num_request_cycles,
            num_emitted=self._num_emitted,
            num_drafts=self._num_drafts,
            num_copies_offered=self._copies_offered,
            num_copies_accepted=self._copies_accepted,
            num_preemptions=scheduler.num_preemptions,
            offered_at_depth=tuple(self._offered),
            accepted_at_depth=tuple(self._accepted),
            budgets=dict(sorted(self._budgets.items())),
            target_s=self._target_s,
            draft_s=self._draft_s,
            other_s=self._other_s,
            num_replayed=graphs.replayed,
            num_launched=graphs.launched,
            num_captured=graphs.captured,
            capturing_s=graphs.cold_s,
            cache_usage=cache.usage,
            num_kept_tokens=cache.num_kept_tokens,
            num_evicted_blocks=cache.num_evicted,
            cache_bytes=cache.num_bytes,
            head_bytes=drafter.weight_bytes,
            head_cache_bytes=cache.head_memory.num_bytes,
            controller=controller,
        )
