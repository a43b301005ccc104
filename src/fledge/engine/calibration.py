"""From what the drafter believes to how often the target agrees.

A head is over- or under-confident, differently at each depth, and a greedy target agrees more often
with a likely draft than a sampled one does; drafts that were copied from the text before are a
matter of their own. For each mode (sampling or not, copied or not) and depth there is one map from
the drafter's log-probability of a node given its parent to the log-probability that the node is
accepted once its parent is. Maps are piecewise linear, rise with their input and stay at or below
0, so a child never scores above its parent.

A map starts as (almost) the identity. It is fitted in two steps: a logistic curve with two
parameters, drawn towards that of all depths, follows few observations; knots drawn towards that
curve follow many. Counting stays on the device; only `refresh` reads, and on CUDA it reads what
the refresh before it asked for.

Legend: B requests, N nodes, L levels of a walk, M modes, D depths, K knots, S pieces of a
map: below all knots, between two, above all.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.engine.monotone import rising
from fledge.engine.readout import Readout
from fledge.ops.accept import Walk
from fledge.ops.copies import NUM_HEAD_MODES, DepthMaps
from fledge.ops.draft_level import Maps
from fledge.ops.tree import TreeBatch, is_real

Array = NDArray[np.float64]

_KNOTS_K = np.array(
    [-9.0, -7.0, -5.5, -4.4, -3.5, -2.8, -2.2, -1.7, -1.3, -1.0]
    + [-0.75, -0.55, -0.4, -0.28, -0.19, -0.12, -0.07, -0.03, -0.01, 0.0]
)
_NUM_MODES = 2 * NUM_HEAD_MODES
_HALF_LIFE_CYCLES = 256
_HALF_LIFE_TRIES = 8192
_CYCLES_PER_REFRESH = 32
"""At most; the first refreshes follow each other sooner."""
_SETTLED_TRIES = 24.0
"""Nodes to be seen before the maps are believed."""
_CURVE_WEIGHT = 16.0
"""Observations at a knot that weigh as much as the logistic curve."""
_POOL_WEIGHT = 16.0
"""Ridge that draws the curve of one depth towards that of all depths."""
_IDENTITY_WEIGHT = 4.0
"""Ridge that draws the curve of all depths towards the identity."""
_HIGHEST_PROB = 0.995
_LOWEST_PROB = 1e-6


class Calibration:
    """One map per mode and depth, and the counts they are made from."""

    def __init__(self, max_depth: int, device: torch.device) -> None:
        self._max_depth = max_depth
        self._knots_K = torch.tensor(_KNOTS_K, dtype=torch.float32, device=device)
        shape = (_NUM_MODES, max_depth, len(_KNOTS_K))
        self._tried_MDK = np.zeros(shape)
        self._accepted_MDK = np.zeros(shape)
        self._table_MDK = np.zeros(shape)
        # Written in place, never replaced: captured graphs hold on to both.
        self._lines_MD2S = torch.zeros(*shape[:2], 2, shape[2] + 1, device=device)
        self._counts_2X = torch.zeros(2, self._tried_MDK.size, dtype=torch.float32, device=device)
        self._readout = Readout(self._counts_2X)
        self._num_cycles = self._num_taken = 0
        self._rebuild()

    @property
    def is_settled(self) -> bool:
        """Whether the maps have seen drafts, and are more than the head's own word."""
        return bool(self._tried_MDK[:NUM_HEAD_MODES].sum() >= _SETTLED_TRIES)

    def maps(self, depth: int) -> Maps:
        """The maps of nodes at a depth, as they are when they are read."""
        return Maps(self._knots_K, self._lines_MD2S[:, min(depth, self._max_depth) - 1])

    @property
    def depth_maps(self) -> DepthMaps:
        """Those of all depths."""
        return DepthMaps(self._knots_K, self._lines_MD2S)

    def apply(self, logprobs: Tensor, depth: int, sampled_B: Tensor) -> Tensor:
        """Calibrated log-probabilities of nodes at a depth given their parents; [B, ...] each."""
        lines_B2S = self._lines_MD2S[sampled_B.long(), min(depth, self._max_depth) - 1]
        given_BX = logprobs.flatten(1)
        piece_BX = torch.bucketize(given_BX, self._knots_K)
        offset_BX, slope_BX = (line_BS.gather(1, piece_BX) for line_BS in lines_B2S.unbind(1))
        return torch.addcmul(offset_BX, slope_BX, given_BX).clamp(max=0.0).view_as(logprobs)

    def observe(self, tree: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        """Count the children of all nodes that the walks visited, and which were accepted."""
        self.tally(tree, walk, sampled_B)
        self.count_cycle()

    def count_cycle(self) -> None:
        """A cycle was tallied, now or by a graph that was replayed."""
        self._num_cycles += 1

    def tally(self, tree: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        """What `observe` does on the device."""
        num_levels = walk.nodes_BL.shape[1]
        level_L = torch.arange(num_levels, device=walk.nodes_BL.device)
        visited_BL = level_L < walk.lengths_B[:, None]
        is_child_BNL = tree.parents_BN[:, :, None] == walk.nodes_BL[:, None, :]
        is_child_BNL = is_child_BNL & visited_BL[:, None, :] & is_real(tree)[:, :, None]
        is_child_BNL[:, 0] = False  # the root is written as its own parent
        is_child_BNL = is_child_BNL & ~walk.failed_B[:, None, None]
        tried_BN = is_child_BNL.any(dim=2)
        depth_BN = is_child_BNL.int().argmax(dim=2).clamp(max=self._max_depth - 1)
        index_BN = torch.arange(tree.max_size, device=tried_BN.device)
        is_visited_BNL = (walk.nodes_BL[:, None, :] == index_BN[:, None]) & visited_BL[:, None, :]
        accepted_BN = tried_BN & is_visited_BNL.any(dim=2)
        mode_B = sampled_B.long()
        if tree.is_copied_B is not None:
            mode_B = mode_B + NUM_HEAD_MODES * tree.is_copied_B
        self._count(tree.logprobs_BN, depth_BN, mode_B, torch.stack([tried_BN, accepted_BN]))

    def refresh_if_due(self) -> None:
        """Refresh, after few cycles at first and after more later."""
        if self._num_cycles >= min(_CYCLES_PER_REFRESH, 1 + self._num_taken // 2):
            self.refresh()

    def refresh(self) -> None:
        """Take in what was counted and redraw the maps."""
        if self._num_cycles == 0:
            return
        counts = self._readout.take()
        num_cycles, self._num_cycles = self._num_cycles, 0
        self._num_taken += num_cycles
        if counts is None:
            return
        tried_MDK, accepted_MDK = counts.double().numpy().reshape(2, *self._tried_MDK.shape)
        num_tries = tried_MDK[:, 0].sum()
        if num_tries == 0:
            return
        half_lives = max(num_cycles / _HALF_LIFE_CYCLES, num_tries / _HALF_LIFE_TRIES)
        kept = 0.5 ** min(half_lives, 4.0)
        self._tried_MDK = kept * self._tried_MDK + tried_MDK
        self._accepted_MDK = kept * self._accepted_MDK + accepted_MDK
        self._rebuild()

    def table(self) -> Array:
        """Calibrated log-probability at each knot, [M, D, K]: greedy, sampled, and copies so."""
        return self._table_MDK.copy()

    def _count(
        self, logprobs_BN: Tensor, depth_BN: Tensor, mode_B: Tensor, counted_2BN: Tensor
    ) -> None:
        """Each node counts at the two knots around it, by how near they are."""
        upper_BN, share_BN = self._locate(logprobs_BN)
        cell_BN = (mode_B[:, None] * self._max_depth + depth_BN) * len(_KNOTS_K)
        for index_BN, weight_BN in ((upper_BN, share_BN), (upper_BN - 1, 1.0 - share_BN)):
            flat_X = (cell_BN + index_BN).flatten()
            self._counts_2X.index_add_(1, flat_X, (counted_2BN * weight_BN).flatten(1))

    def _locate(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The knot at or above each value, and how near the value is to it, 0 to 1."""
        inside = logprobs.float().clamp(min=float(_KNOTS_K[0]), max=0.0)
        upper = torch.searchsorted(self._knots_K, inside).clamp(min=1)
        below, above = self._knots_K[upper - 1], self._knots_K[upper]
        return upper, (inside - below) / (above - below)

    def _rebuild(self) -> None:
        self._table_MDK = _fit(self._tried_MDK, self._accepted_MDK)
        lines_MD2S = torch.from_numpy(_lines(self._table_MDK)).float()
        if self._lines_MD2S.is_cuda:
            lines_MD2S = lines_MD2S.pin_memory()
        self._lines_MD2S.copy_(lines_MD2S, non_blocking=True)


def _lines(table_MDK: Array) -> Array:
    """Offset and slope of each piece; below the lowest knot the slope is 1, above the highest 0."""
    slope_MDS = np.diff(table_MDK, axis=-1) / np.diff(_KNOTS_K)
    ends = [(0, 0)] * (table_MDK.ndim - 1)
    slope_MDS = np.pad(slope_MDS, [*ends, (1, 1)], constant_values=(1.0, 0.0))
    # Each line goes through a knot that it touches.
    touched_S = np.concatenate([[0], np.arange(len(_KNOTS_K))])
    offset_MDS = table_MDK[..., touched_S] - slope_MDS * _KNOTS_K[touched_S]
    lines: Array = np.stack([offset_MDS, slope_MDS], axis=-2)
    return lines


def _fit(tried_MDK: Array, accepted_MDK: Array) -> Array:
    """Log-probabilities at the knots, rising with them."""
    identity_2 = np.array([1.0, 0.0])
    pooled_M2 = _fit_logistic(tried_MDK.sum(1), accepted_MDK.sum(1), identity_2, _IDENTITY_WEIGHT)
    curve_MD2 = _fit_logistic(tried_MDK, accepted_MDK, pooled_M2[:, None, :], _POOL_WEIGHT)
    curve_MDK = _logistic(curve_MD2)
    probs_MDK = (accepted_MDK + _CURVE_WEIGHT * curve_MDK) / (tried_MDK + _CURVE_WEIGHT)
    table: Array = np.log(rising(probs_MDK).clip(_LOWEST_PROB, 1.0))
    return table


def _knot_logits() -> Array:
    probs_K = np.exp(_KNOTS_K).clip(max=_HIGHEST_PROB)
    logits: Array = np.log(probs_K / (1.0 - probs_K))
    return logits


_LOGITS_K = _knot_logits()


def _logistic(curve: Array) -> Array:
    """Probabilities at the knots of curves given by slope and offset."""
    logits = curve[..., :1] * _LOGITS_K + curve[..., 1:]
    probs: Array = 1.0 / (1.0 + np.exp(-logits.clip(-30.0, 30.0)))
    return probs


def _fit_logistic(tried: Array, accepted: Array, prior: Array, weight: float) -> Array:
    """Slope and offset by a few damped Newton steps; `weight` draws them towards the prior."""
    curve = np.broadcast_to(prior, (*tried.shape[:-1], 2)).copy()
    design_2K = np.stack([_LOGITS_K, np.ones_like(_LOGITS_K)])
    for _ in range(6):
        probs = _logistic(curve)
        gradient = (accepted - tried * probs) @ design_2K.T - weight * (curve - prior)
        spread = tried * probs * (1.0 - probs)
        hessian = np.einsum("...k,ik,jk->...ij", spread, design_2K, design_2K)
        hessian = hessian + weight * np.eye(2)
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        curve = curve + step.clip(-1.0, 1.0)
        curve[..., 0] = curve[..., 0].clip(0.05, 5.0)
        curve[..., 1] = curve[..., 1].clip(-8.0, 8.0)
    result: Array = curve
    return result
