"""Cycles and passes over prompts that keep nothing for the head, while it sleeps.

They are those of an engine without a head, graphs of their own. Where such a graph is missing, what
keeping features costs is added up, and once that is as much as a capture would cost, it is made.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many

from fledge.engine.drafter import Drafter
from fledge.engine.graphs import Graphs
from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import Filters, SteadyBatch
from fledge.engine.steady_places import SteadyPlaces
from fledge.engine.steady_reading import Chunk
from fledge.engine.steady_runs import SteadyRuns, Trees
from fledge.engine.steady_sizes import SteadySizes

_KEEPING = 0.01
"""Of a cycle without drafts, what keeping features takes."""


class BareCycles:
    """Which cycles keep nothing for the head."""

    is_wanted = False
    """Whether the head sleeps."""

    examined: frozenset[Sequence] | None = None
    """In an exam of the head, whose prompts it is told of."""

    def __init__(
        self, runs: SteadyRuns, sizes: SteadySizes, graphs: Graphs, drafter: Drafter
    ) -> None:
        self._runs, self._sizes, self._graphs = runs, sizes, graphs
        self._has_features = bool(drafter.taps)
        self._lost_s: dict[tuple[int, Filters], float] = {}
        self.num_bare = self.num_told = 0
        """Tokens of cycles and prompts that were kept from the head, and that it was told."""

    def _takes(self, size: int, filters: Filters) -> bool:
        """Whether the next cycle without drafts of so many places is one."""
        if not (self.is_wanted and self._has_features):
            return False
        if not self._graphs.is_capturing or self._runs.is_bare_ready(size, filters):
            return True
        key = size, filters
        lost_s = self._lost_s.get(key, 0.0) + _KEEPING * self._sizes.plain_s(size)
        self._lost_s[key] = lost_s
        return lost_s > self._graphs.cost_s

    def verify(
        self, batch: SteadyBatch, trees: Trees | None, places: SteadyPlaces, *, has_head: bool
    ) -> None:
        """The target's part of a cycle; `has_head` where the head has read or drafted in it."""
        filters = places.filters
        is_bare = trees is None and not has_head and self._takes(batch.size, filters)
        if is_bare:
            self._runs.verify_bare(batch, filters)
        else:
            self._runs.verify(batch, trees, filters)
        self.note(places.sequences, places.num_requests, is_bare=is_bare)

    def sort_out(self, chunks: Many[Chunk]) -> tuple[list[Chunk], int]:
        """Parts of prompts, those that the head is told of first, and how many these are."""
        if not self._has_features:
            return list(chunks), len(chunks)
        told, others = list[Chunk](), list[Chunk]()
        for seq, chunk in chunks:
            is_told = not self.is_wanted and (self.examined is None or seq in self.examined)
            (told if is_told else others).append((seq, chunk))
            self.note([seq], chunk, is_bare=not is_told)
        return [*told, *others], len(told)

    def note(self, sequences: Iterable[Sequence], num_tokens: int, *, is_bare: bool) -> None:
        """So many tokens of these are read by the target; whether the head is told of them."""
        if not self._has_features:
            return
        if not is_bare:
            self.num_told += num_tokens
            return
        self.num_bare += num_tokens
        for seq in sequences:
            seq.lacks_features = True
