"""Requests that decode together cycle after cycle, as tensors that never move.

A captured cycle reads and writes fixed memory. This is that memory: where each request stands, and
what it said last. A place without a request looks at a spare row of the block tables, which has
memory of its own that nobody reads.

Legend: B places, L tokens a request may say in one cycle, X lines of the state.
"""

import struct
from collections.abc import Sequence as Many
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.sequence import Sequence
from fledge.ops.accept import Walk
from fledge.ops.noised_top import Draws
from fledge.ops.root_pass import Ends
from fledge.ops.sampling import SampledRows, SamplingBatch
from fledge.ops.settle import FIRST_TOKEN, Standing, settle
from fledge.ops.staging import send
from fledge.ops.tree import TreeBatch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Places of batches; who is between two of them goes to the larger. Few places more cost nothing
where there are few, and a size that has to be captured while its requests wait costs much."""

_ROW, _LEN, _FRESH, _SAID, _DRAFTED, _GREEDY, _SEED, _TOP_K = range(8)
_TEMPERATURE, _TOP_P, _MIN_P = range(8, 11)
_NUM_LINES = 11
_EMPTY_LEN = 2
"""A head reads the feature before a token, so that the shortest request has two."""


def batch_size(num_requests: int) -> int:
    """Places that so many requests are given: cycles are captured for few numbers."""
    return next((size for size in SIZES if size >= num_requests), num_requests)


class Place(NamedTuple):
    """A request on its way into a batch."""

    sequence: Sequence
    is_drafted: bool
    fresh: Many[int]
    """Its newest tokens: those that the head has not read, or the last alone."""


class Filters(NamedTuple):
    """What the requests of a batch ask of sampling between them: a cycle is captured for it."""

    can_sample: bool
    largest_top_k: int
    """0 for none, else a power of two that is not below anybody's."""

    has_top_p: bool
    has_min_p: bool


def filters_of(sequences: Many[Sequence]) -> Filters:
    sampled = [one for seq in sequences if not (one := seq.request.params).is_greedy]
    top_k = max((one.top_k for one in sampled), default=0)
    return Filters(
        can_sample=bool(sampled),
        largest_top_k=1 << (top_k - 1).bit_length() if top_k else 0,
        has_top_p=any(one.top_p < 1 for one in sampled),
        has_min_p=any(one.min_p > 0 for one in sampled),
    )


class SteadyBatch:
    """State of a number of places on the device."""

    def __init__(self, size: int, num_levels: int, *, spare_row: int, device: torch.device) -> None:
        self.size, self.num_levels, self.device = size, num_levels, device
        self._spare_row = spare_row
        numbers = [_bits(1.0), _bits(1.0), _bits(0.0)]
        self._empty = [spare_row, _EMPTY_LEN, 1, 0, 0, 1, 0, 0, *numbers] + [0] * num_levels
        self._empty_X = send(self._empty, device)
        self.state_XB = self._empty_X[:, None].repeat(1, size)
        self.facts_XB = torch.zeros(FIRST_TOKEN + num_levels, size, dtype=torch.long, device=device)
        """What the host reads of a cycle, as `Standing` says."""

    def fill(self, places: Many[Place]) -> None:
        """Take these requests in, one a place; the places behind them stay empty."""
        columns = [self._column(*place) for place in places]
        columns += [self._empty] * (self.size - len(places))
        self.state_XB.copy_(send(columns, self.device).t())

    def rehearse(self, filters: Filters) -> None:
        """Nobody's requests that sample, where these filters are about some that do.

        A kernel is checked against its twin when it first runs, which may be now.
        """
        self.fill([])
        if filters.can_sample:
            self.state_XB[_GREEDY] = 0
            self.state_XB[_SEED] = torch.arange(self.size, device=self.device)

    def put(self, places: Many[Place], where: Many[int]) -> None:
        """Take these requests in beside those that are there."""
        columns = [self._column(*place) for place in places]
        self.state_XB.index_copy_(1, send(where, self.device), send(columns, self.device).t())

    def copy_from(self, other: "SteadyBatch", theirs: Many[int], ours: Many[int]) -> None:
        """Have requests stand here where they stand there; the host need not know where."""
        columns_XC = other.state_XB.index_select(1, send(theirs, self.device))
        self.state_XB.index_copy_(1, send(ours, self.device), columns_XC)

    def take_over(self, other: "SteadyBatch", theirs: Many[int]) -> None:
        """Have these of its requests stand in the first places, and nobody behind them."""
        self.state_XB.copy_(self._empty_X[:, None].expand_as(self.state_XB))
        self.copy_from(other, theirs, list(range(len(theirs))))

    def _column(self, seq: Sequence, is_drafted: bool, fresh: Many[int]) -> list[int]:
        params = seq.request.params
        assert len(fresh) <= self.num_levels, "the head has not caught up"
        line = [0] * (_NUM_LINES + self.num_levels)
        line[_ROW], line[_LEN], line[_FRESH] = seq.row, seq.len, len(fresh)
        line[_SAID], line[_DRAFTED] = len(seq.output_ids), is_drafted
        line[_GREEDY], line[_SEED], line[_TOP_K] = params.is_greedy, params.seed, params.top_k
        line[_TEMPERATURE] = _bits(1.0 if params.is_greedy else params.temperature)
        line[_TOP_P], line[_MIN_P] = _bits(params.top_p), _bits(params.min_p)
        line[_NUM_LINES : _NUM_LINES + len(fresh)] = fresh
        return line

    def clear(self, places: Many[int]) -> None:
        """The requests there have ended; nothing waits for the device."""
        nobody_XC = self._empty_X[:, None].expand(-1, len(places))
        self.state_XB.index_copy_(1, send(places, self.device), nobody_XC)

    @property
    def rows_B(self) -> Tensor:
        return self.state_XB[_ROW]

    @property
    def lens_B(self) -> Tensor:
        """Committed tokens, the newest included."""
        return self.state_XB[_LEN]

    @property
    def fresh_B(self) -> Tensor:
        """Of them, those that the head has not read: the last ones."""
        return self.state_XB[_FRESH]

    @property
    def said_B(self) -> Tensor:
        """Tokens of the answer."""
        return self.state_XB[_SAID]

    @property
    def is_drafted_line_B(self) -> Tensor:
        """The memory that `is_drafted_B` is read from."""
        return self.state_XB[_DRAFTED]

    @property
    def is_drafted_B(self) -> Tensor:
        return self.is_drafted_line_B.bool()

    @property
    def is_greedy_B(self) -> Tensor:
        return self.state_XB[_GREEDY].bool()

    @property
    def fresh_tokens_BL(self) -> Tensor:
        """Tokens that the head has not read; behind them any."""
        return self.state_XB[_NUM_LINES:].t()

    @property
    def newest_B(self) -> Tensor:
        return self.fresh_tokens_BL.gather(1, self.fresh_B[:, None] - 1)[:, 0]

    @property
    def ends(self) -> Ends:
        """What a pass over the newest tokens has to know."""
        return Ends(self.rows_B, self.lens_B, self.fresh_B, self.state_XB[_NUM_LINES:])

    @property
    def _numbers_3B(self) -> Tensor:
        """Temperatures, top-p and min-p."""
        return self.state_XB[_TEMPERATURE : _MIN_P + 1].view(torch.float64)

    def draws(self, sampled_B: Tensor) -> Draws:
        """How the requests sample, for a drafter."""
        whole = sampled_B, self.state_XB[_SEED], self.said_B, self.state_XB[_TOP_K]
        return Draws(*whole, *self._numbers_3B)

    def sampling(self, filters: "Filters") -> SamplingBatch:
        """How the requests choose their tokens."""
        temperature_B, top_p_B, min_p_B = self._numbers_3B
        seed_B = self.state_XB[_SEED]
        if not filters.can_sample:
            is_greedy_B = _everyone(self.size, self.device)
            return SamplingBatch(is_greedy_B, temperature_B, seed_B, (), None, 0)
        everyone = SampledRows(
            rows_S=torch.arange(self.size, device=self.device),
            temperature_S=temperature_B,
            seed_S=seed_B,
            top_k_S=self.state_XB[_TOP_K],
            top_p_S=top_p_B,
            min_p_S=min_p_B,
            largest_top_k=filters.largest_top_k,
            has_top_p=filters.has_top_p,
            has_min_p=filters.has_min_p,
        )
        return SamplingBatch(
            greedy_B=self.is_greedy_B,
            temperature_B=temperature_B,
            seed_B=seed_B,
            sampled=(everyone,),
            asking_A=None,
            num_logprobs=0,
        )

    def settle(self, walk: Walk, trees: TreeBatch) -> None:
        """Requests have said what their walks say; the host may read what came of it."""
        standing = Standing(
            rows_B=self.rows_B,
            lens_B=self.lens_B,
            fresh_B=self.fresh_B,
            said_B=self.said_B,
            tokens_MB=self.state_XB[_NUM_LINES:],
            facts_XB=self.facts_XB,
        )
        settle(walk, trees, standing, self._spare_row)


@cache
def _everyone(size: int, device: torch.device) -> Tensor:
    """Made once and never let go: a captured graph may have read it."""
    return torch.ones(size, dtype=torch.bool, device=device)


def _bits(number: float) -> int:
    """The bits of a float64 as a whole number."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
