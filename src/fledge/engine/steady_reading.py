"""Prompts read beside cycles that run ahead: a pass of their own that nobody waits for either.

The pass is captured for few sizes, filled up with tokens that nobody looks at. Where the device
takes longer for the prompts than the host does to launch the pass piece by piece, it is launched as
long as they are. What a prompt's last token says is written to where the batch takes it from; the
host reads it later. The head reads the prompt in a pass of its own behind that, so that no first
token waits for it.

    rows      a4 a5 a6 | b0 b1 b2 b3 | - - - -      chunks of two prompts, then what only fills
    requests  a        | b           | spare

Legend: T rows of the pass, B prompts with the one that fills, X lines of the state.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.block_rows import without_drafts
from fledge.engine.cache import PagedCache
from fledge.engine.drafter import Drafter
from fledge.engine.graphs import Graphs
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import Filters, Place, SteadyBatch, filters_of
from fledge.engine.steady_flight import Collected
from fledge.models.target import Target
from fledge.ops.accept import Walk
from fledge.ops.paged import TreePass, make_tree_pass
from fledge.ops.staging import send
from fledge.ops.tree import root_only

_SMALLEST, _SECOND = 32, 256
_ROWS_PER_PROMPT = 16
_ENOUGH_ROWS = 256
"""Shorter passes say nothing of what a row costs: they wait for weights."""
_DEVICES_OWN = 1.5
"""Over what asking for a pass took, what it takes if the device was not waiting for the host."""
_RATE = 0.3

Chunk = tuple[Sequence, int]
"""A request, and how many of its tokens are read."""


def pass_sizes(max_tokens: int) -> list[int]:
    """Rows that passes have: 32, 64, 128, 256, 384, 512, 768, ... and the most there may be."""
    sizes, size = {max_tokens}, _SMALLEST
    while size < max_tokens:
        sizes |= {size, min(size * 3 // 2, max_tokens)} if size >= _SECOND else {size}
        size *= 2
    return sorted(sizes)


def _kind(num_rows: int, num_prompts: int, filters: Filters, is_bare: bool) -> Hashable:
    return ("read" if not is_bare else "read bare", num_rows, num_prompts, filters)


class Passed(NamedTuple):
    """What a head reads of a pass, and the graph that leaves it in the same place every time."""

    packed: TreePass
    features_TF: Tensor
    graph: int | None = None
    is_exact: bool = False
    """Whether the pass is as long as its prompts, and none of its kind will be captured."""

    def first(self, num_rows: int) -> "Passed":
        """Of some rows, as a head that only stores what it makes of them reads them."""
        names = ("token_ids_T", "positions_T", "request_T", "numbers_T", "write_slots_T")
        rows = {name: getattr(self.packed, name)[:num_rows] for name in names}
        packed = replace(self.packed, **rows, views={})
        return Passed(packed, self.features_TF[:num_rows], is_exact=True)


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory that a pass of one size reads from and leaves its outcome in."""

    num_rows: int
    numbers_X: Tensor
    """Tokens of all rows, then how many each prompt brings, then how many it has cached."""

    batch: SteadyBatch

    @property
    def tokens_T(self) -> Tensor:
        return self.numbers_X[: self.num_rows]

    @property
    def lengths_2B(self) -> Tensor:
        return self.numbers_X[self.num_rows :].view(2, -1)


class SteadyReader:
    """Passes over prompts."""

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        drafter: Drafter,
        walk: Callable[..., Walk],
        graphs: Graphs,
        *,
        num_levels: int,
        max_tokens: int,
        max_requests: int,
    ) -> None:
        self._target, self._cache, self._drafter, self._walk = target, cache, drafter, walk
        self._graphs, self._num_levels = graphs, num_levels
        self.sizes, self._max_requests = pass_sizes(max_tokens), max_requests
        self._readings: dict[tuple[int, int], Reading] = {}
        self._tables = without_drafts(cache.all_tables, target.context_len)
        self._most_each = min(cache.max_tokens, target.context_len)
        self._row_s = 0.0
        """What a row of a long pass takes; 0 while none was timed."""

    def read(
        self, chunks: Many[Chunk], drafted: Many[bool], *, num_told: int
    ) -> tuple[SteadyBatch, Passed | None]:
        """Ask for a pass over these; the batch that comes back has a column for each.

        `drafted` are those who will be drafted for. What comes beside it is for `tell_head`: of the
        first `num_told`, None where there are none.
        """
        is_told = num_told > 0
        num_tokens = sum(chunk for _, chunk in chunks)
        num_rows, num_prompts = self._size(num_tokens, len(chunks))
        num_nobody = num_prompts + 1 - len(chunks)
        filters = filters_of([seq for seq, chunk in chunks if chunk == seq.num_unread])
        ready = [
            is_bare
            for is_bare in ([False] if is_told else [True, False])
            if self._graphs.number_of(_kind(num_rows, num_prompts, filters, is_bare)) is not None
        ]
        # A pass that is captured with features is no slower than one that would be without.
        is_bare = ready[0] if ready else not is_told
        is_exact = self._is_long(num_tokens, num_rows, is_ready=bool(ready))
        # There may be no places for so many that only fill.
        is_exact = is_exact or num_rows - num_tokens > num_nobody * self._most_each
        if is_exact:
            num_rows = num_tokens
        reading = self._reading(num_rows, num_prompts, is_kept=not is_exact)
        self._fill(reading, chunks, drafted)
        if is_exact:
            passed = self._run(reading, filters, is_bare=not is_told)
            passed = None if passed is None else passed._replace(is_exact=True)
        else:
            passed = self._run_captured(reading, filters, is_bare)
        if passed is not None and num_told < len(chunks):
            passed = passed.first(sum(chunk for _, chunk in chunks[:num_told]))
        return reading.batch, passed if is_told else None

    def tell_head(self, passed: Passed | None, *, with_entries: bool) -> None:
        """Keep the features of a pass for the head; `with_entries` has it read the tokens too."""
        if passed is None:
            return

        def work() -> None:
            self._drafter.remember(passed.features_TF, passed.packed)
            if with_entries:
                assert isinstance(self._drafter, HeadDrafter)
                self._drafter.store_entries(passed.packed)

        name = ("told", passed.packed.num_tokens, with_entries)
        if passed.is_exact:
            work()
        elif passed.graph is None:  # features lie where none will lie again
            self._graphs.launch(name, work, is_pass=False)
        else:
            kind = ("tell", passed.graph, with_entries)
            self._graphs.run(kind, work, seen_as=name, is_pass=False)

    def _is_long(self, num_tokens: int, num_rows: int, *, is_ready: bool) -> bool:
        """Whether launching the pass piece by piece is no slower than a captured one that fits."""
        if not self._graphs.is_capturing:
            return False
        launch_s, filling = self._graphs.launch_s, num_rows - num_tokens
        if is_ready:
            return filling * self._row_s > launch_s
        return num_tokens * self._row_s > 1.5 * launch_s

    def observe(self, got: Collected) -> None:
        """What a pass has taken, if it was over prompts."""
        one, num_tokens = got.started, got.started.load.num_other_tokens
        if not one.is_reading or num_tokens < _ENOUGH_ROWS:
            return
        # Launched piece by piece, short passes take what the host takes: rows have no part in it.
        if got.target_s > _DEVICES_OWN * one.asking_s:
            row_s = got.target_s / num_tokens
            self._row_s += (_RATE if self._row_s else 1.0) * (row_s - self._row_s)

    def rehearse(
        self, num_rows: int, filters: Filters, *, with_head: bool, is_told: bool = True
    ) -> None:
        """A pass over nobody's prompts, so that one of this size is captured when it comes."""
        num_prompts = self._most_prompts(num_rows)
        if num_prompts and num_rows <= (num_prompts + 1) * self._most_each:
            reading = self._reading(num_rows, num_prompts, is_kept=True)
            self._fill(reading, [], [])
            reading.batch.rehearse(filters)
            passed = self._run_captured(reading, filters, is_bare=not is_told)
            self.tell_head(passed, with_entries=with_head)

    def _run_captured(self, reading: Reading, filters: Filters, is_bare: bool) -> Passed | None:
        kind = _kind(reading.num_rows, reading.batch.size - 1, filters, is_bare)
        passed, graph = self._graphs.run(kind, lambda: self._run(reading, filters, is_bare=is_bare))
        return None if passed is None else passed._replace(graph=graph)

    def _size(self, num_tokens: int, num_prompts: int) -> tuple[int, int]:
        """Rows and prompts of the pass that these fit in: one number of prompts for most sizes."""
        for size in self.sizes:
            most = self._most_prompts(size)
            if size >= num_tokens and most >= num_prompts:
                return size, most
        return max(num_tokens, self.sizes[-1]), num_prompts

    def _most_prompts(self, num_rows: int) -> int:
        if num_rows == self.sizes[-1]:  # there is no larger one for more of them
            return self._max_requests
        return min(self._max_requests, num_rows // _ROWS_PER_PROMPT)

    def _reading(self, num_rows: int, num_prompts: int, *, is_kept: bool) -> Reading:
        key = num_rows, num_prompts
        if key in self._readings:
            return self._readings[key]
        device, count = self._target.device, num_prompts + 1
        made = Reading(
            num_rows,
            torch.zeros(num_rows + 2 * count, dtype=torch.long, device=device),
            SteadyBatch(count, self._num_levels, spare_row=self._cache.spare_row, device=device),
        )
        if is_kept:
            self._readings[key] = made
        return made

    def _fill(self, reading: Reading, chunks: Many[Chunk], drafted: Many[bool]) -> None:
        tokens = [
            token
            for seq, chunk in chunks
            for token in seq.token_ids[seq.kv_len : seq.kv_len + chunk]
        ]
        num_filling = reading.num_rows - len(tokens)
        # Shared out, so that none is longer than what there are places for.
        num_nobody = reading.batch.size - len(chunks)
        each, rest = divmod(num_filling, num_nobody)
        filling = [each + (place < rest) for place in range(num_nobody)]
        lengths = [chunk for _, chunk in chunks] + filling
        cached = [seq.kv_len for seq, _ in chunks] + [0] * len(filling)
        numbers = tokens + [0] * num_filling + lengths + cached
        reading.numbers_X.copy_(send(numbers, self._target.device))
        reading.batch.fill(
            [
                Place(seq, is_drafted, seq.token_ids[-1:])
                for (seq, _), is_drafted in zip(chunks, drafted, strict=True)
            ]
        )

    @torch.no_grad()
    def _run(self, reading: Reading, filters: Filters, *, is_bare: bool) -> Passed | None:
        batch, (chain_B, context_B) = reading.batch, reading.lengths_2B
        packed = make_tree_pass(
            chain_tokens_C=reading.tokens_T,
            chain_B=chain_B,
            context_B=context_B,
            trees=None,
            num_rows=reading.num_rows,
            tables=self._tables[batch.rows_B],
            num_short=0,
            last_position=self._target.context_len - 1,
        )
        # Places that nobody has bring no rows: they look at any.
        last_B = (packed.starts_B + chain_B - 1).clamp(min=0)
        output = self._target.forward(
            packed,
            self._cache.target_memory,
            logit_rows_R=last_B,
            taps=() if is_bare else self._drafter.taps,
        )
        roots = root_only(batch.newest_B)
        walk = self._walk(
            output.logits_RV,
            torch.arange(batch.size, device=last_B.device)[:, None],
            roots,
            batch.sampling(filters),
            batch.said_B,
            max_depth=0,
        )
        batch.settle(walk, roots)
        if output.features_TF is None:
            return None
        # Made here: what the pass keeps of it must not be another graph's.
        slots_T = packed.view(self._drafter.window).write_slots_T
        packed = replace(packed, write_slots_T=slots_T, views={})
        return Passed(packed, output.features_TF)
