"""Whom the head is told of: everybody while it is awake, nobody while it sleeps, few in an exam.

An exam is decided by a few trees, and one cycle has one for each request. More requests would say
nothing more, and have all that they share with others read again for the head.
"""

from itertools import islice

from fledge.engine.cache import PagedCache
from fledge.engine.head_sleep import NUM_EXAMINED
from fledge.engine.plan_choice import PlanChoice
from fledge.engine.scheduler import Scheduler
from fledge.engine.sequence import Sequence
from fledge.engine.steady import Steady

_MOST_USED = 0.8
"""Of the memory, where a head that sleeps may be examined: drafts need room for everybody."""


class Exams:
    """Chooses the requests that exams are about."""

    def __init__(
        self, cache: PagedCache, scheduler: Scheduler, steady: Steady, choice: PlanChoice
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._steady, self._choice = steady, choice

    def meet_requests(self) -> None:
        """Requests may start: those that the head is told of need all that is before them."""
        if not self._scheduler.num_startable:
            return
        choice, known, chosen = self._choice, self._cache.known, list[Sequence]()
        if choice.is_asleep or choice.is_exam:
            chosen = self._chosen()
        has_room = bool(chosen) and self._cache.usage < _MOST_USED
        known.needs_features = choice.meets_requests(has_room=has_room)
        known.examined = frozenset(chosen) if choice.is_exam else None
        self._steady.bare.examined = known.examined

    def _chosen(self) -> list[Sequence]:
        """Those who are examined already, and as many who come as are missing."""
        before = self._steady.bare.examined or frozenset()
        # Of an earlier exam some may still be there, read on while the head slept.
        told = [seq for seq in before if not seq.lacks_features]
        there = [seq for seq in told if seq.is_waiting or seq.row >= 0]
        coming = (
            seq for seq in self._scheduler.waiting if seq not in before and self._can_draft_for(seq)
        )
        return [*there, *islice(coming, NUM_EXAMINED - len(there))]

    def _can_draft_for(self, seq: Sequence) -> bool:
        """Whether it goes on behind its first token, in cycles that run ahead."""
        request = seq.request
        return request.params.speculate and request.max_new_tokens > 1 and self._steady.can_run(seq)
