"""How many drafts a cycle will have accepted, for every depth, width and number of nodes.

Cycles that measure their candidates say what they expect of every smaller plan; a decayed average
of that is kept, and scaled by how many drafts were really accepted against how many were expected.
What a small plan cannot see (deeper levels, wider trees) moves with what it does see until a larger
plan is tried again. A drafter that scores no candidates leaves the curves as assumed at the start;
the scale then does all the work.

Legend: D depths, P width presets, G node grid.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.contracts.settings import TreeSettings
from fledge.engine.draft_gains import NODE_GRID, expected_gains, width_presets
from fledge.engine.draft_plan import CycleReport
from fledge.engine.drift import DriftWatch
from fledge.engine.tree_levels import TreeLevels
from fledge.ops.draft_level import known_children

Array = NDArray[np.float64]

_ASSUMED_BEST = 0.6
"""Conditional probability of the best child of a node, before anything was drafted."""
_ASSUMED_SHARES = (0.3, 0.125, 0.075)
"""Of what it leaves, what the next best have."""
_SCALE_TOKENS = 16.0
"""Accepted drafts that weigh as much as the assumption that scores are right."""
_UNSEEN_TOKENS = 4.0
"""The same while no scores have been seen, only what was assumed."""
_LEVEL_TOKENS = 8.0
"""Accepted drafts of one level that weigh as much as what is known of all levels."""
_FORGETTING = 1 / 512
"""How fast evidence is let go while nothing is drafted, so that bad luck does not last."""
_SEEN_AFTER_CHANGE = 4.0
_SCALE_RANGE = (0.02, 4.0)
_GRID_G = np.array([0.0, *NODE_GRID])


class AcceptanceModel:
    """Expected accepted drafts per request."""

    def __init__(self, tree: TreeSettings, best_child: float = _ASSUMED_BEST) -> None:
        self.widths = width_presets(tree.width)
        self._tree, self._best_child = tree, best_child
        self.forget()

    def forget(self) -> None:
        """Assume what was assumed at the start."""
        tree = self._tree
        self._gains_DPG = _assumed_gains(tree, self._best_child)
        self._rising_DPG = _rising(self._gains_DPG)
        self._num_seen_DP = np.zeros(self._gains_DPG.shape[:2])
        self._last_seen_DP = np.zeros(self._gains_DPG.shape[:2])
        self._has_gains = False
        self._drift = DriftWatch()
        self._num_cycles = 0
        self._accepted = 0.0
        self._expected = 0.0
        self._is_chain = tree.width == 1
        self._levels_2D = np.zeros((2, tree.depth))
        """Accepted and expected drafts of each level of chains."""
        self._reached_D = [0.0] * tree.depth
        self._accepted_D = [0.0] * tree.depth

    @property
    def has_observed(self) -> bool:
        """Whether anything was ever drafted."""
        return self._num_cycles > 0

    @property
    def scale(self) -> float:
        """Drafts accepted for each one expected."""
        tokens = _SCALE_TOKENS if self._has_gains else _UNSEEN_TOKENS
        ratio = (self._accepted + tokens) / (self._expected + tokens)
        return min(max(ratio, _SCALE_RANGE[0]), _SCALE_RANGE[1])

    def _scaled_DPG(self) -> Array:
        """Gains by what was accepted; of chains level by level, where none takes another's nodes.

        One scale for all levels would make up for poor scores of deep ones by too much of the
        first, and chains would be cut short.
        """
        if not self._is_chain:
            return self.scale * self._rising_DPG
        accepted_D, expected_D = self._levels_2D
        tokens = _LEVEL_TOKENS if self._has_gains else _UNSEEN_TOKENS
        scale_D = (accepted_D + tokens * self.scale) / (expected_D + tokens)
        levels_DPG = np.diff(self._rising_DPG, axis=0, prepend=0.0)
        scaled: Array = (levels_DPG * scale_D.clip(*_SCALE_RANGE)[:, None, None]).cumsum(axis=0)
        return scaled

    def gains(self, nodes_per_request: Array) -> Array:
        """Expected accepted drafts per request, [D, P, number of node counts]."""
        upper = np.searchsorted(_GRID_G, nodes_per_request).clip(1, len(_GRID_G) - 1)
        low, high = _GRID_G[upper - 1], _GRID_G[upper]
        share = ((nodes_per_request - low) / (high - low)).clip(0.0, 1.0)
        scaled_DPG = self._scaled_DPG()
        below, above = scaled_DPG[..., upper - 1], scaled_DPG[..., upper]
        gains: Array = below * (1.0 - share) + above * share
        return gains

    def gain(self, depth: int, width: int, nodes_per_request: float) -> float:
        """Expected accepted drafts per request of one plan."""
        row_G = self._scaled_DPG()[depth - 1, self.preset(width)]
        return float(np.interp(nodes_per_request, _GRID_G, row_G))

    def preset(self, width: int) -> int:
        """Index of the widest preset that is no wider."""
        return max(i for i, preset in enumerate(self.widths) if preset <= width)

    def acceptance(self) -> list[float | None]:
        """Share of walks that went on at each depth, None where none came by."""
        pairs = zip(self._accepted_D, self._reached_D, strict=True)
        return [None if reached < 0.5 else taken / reached for taken, reached in pairs]

    def observe(self, report: CycleReport) -> None:
        """Take in a cycle."""
        if report.plan.is_plain:
            self._trust_less(1.0 - _FORGETTING)
            return
        num_requests = report.num_drafted
        # Many requests say in a few cycles what one says in many; what was accepted is said by
        # chance, what was expected is not.
        window = 8.0 + 56.0 / num_requests
        kept = math.exp(-1.0 / (24.0 + 160.0 / num_requests))
        self._num_cycles += 1
        measured_DPG = None
        if report.gains is not None and report.is_calibrated:
            measured_DPG = report.gains.double().numpy()
            self._watch(float(measured_DPG[0, 0, -1]), num_requests)
            self._take_gains(measured_DPG, num_requests, window)
        if (expected_D := self._expected_of(report, measured_DPG)) is not None:
            self._trust_less(kept)
            self._accepted += sum(report.accepted_D)
            self._expected += expected_D[-1] * num_requests
            accepted_D, depth = report.accepted_D[: report.plan.depth], report.plan.depth
            self._levels_2D[0, : len(accepted_D)] += accepted_D
            self._levels_2D[1, :depth] += np.diff(expected_D, prepend=0.0) * num_requests
        self._count_depths(report, kept)

    def _watch(self, best_child: float, num_requests: int) -> None:
        """Look out for change in what every plan sees: the chance of a root's best child."""
        if self._drift.observe(best_child, num_requests):
            # Learn as at the start, from where things stand.
            self._num_seen_DP = np.minimum(self._num_seen_DP, _SEEN_AFTER_CHANGE)
            self._trust_less(0.25)

    def _trust_less(self, kept: float) -> None:
        """Let go of a part of what was accepted and expected."""
        self._accepted *= kept
        self._expected *= kept
        self._levels_2D *= kept

    @property
    def is_surprised(self) -> bool:
        """The newest measurement was unusual: another one would tell whether it will stay so."""
        return self._drift.is_suspicious

    def _expected_of(self, report: CycleReport, measured_DPG: Array | None) -> Array | None:
        """What the scores promised down to each level, not scaled; None while the first measurement
        is on its way."""
        plan, preset = report.plan, self.preset(report.plan.width)
        rows_DG = self._rising_DPG[: plan.depth, preset]
        if measured_DPG is not None:
            # A head with a tiny vocabulary may have fewer children than the plan is wide.
            preset = min(preset, measured_DPG.shape[1] - 1)
            rows_DG = np.pad(measured_DPG[: plan.depth, preset], [(0, 0), (1, 0)])
        elif self._has_gains and self._num_seen_DP[plan.depth - 1, preset] == 0:
            return None
        nodes = plan.nodes / report.num_drafted
        return np.array([np.interp(nodes, _GRID_G, row_G) for row_G in rows_DG])

    def _take_gains(self, gains_DPG: Array, num_requests: int, window: float) -> None:
        if not self._has_gains:
            # What was accepted so far says how far off the assumption was, nothing of the scores.
            self._has_gains = True
            self._trust_less(0.0)
        depth, num_presets, _ = gains_DPG.shape
        seen = (slice(depth), slice(num_presets))
        age_DP = self._num_cycles - self._last_seen_DP[seen]
        rate_DP = 1.0 - np.exp(-age_DP / window)
        rate_DP = np.minimum(rate_DP, num_requests / (num_requests + 24.0))
        rate_DP = np.maximum(rate_DP, num_requests / (self._num_seen_DP[seen] + num_requests + 4.0))
        before_DPG = self._gains_DPG.copy()
        self._gains_DPG[seen] += rate_DP[..., None] * (gains_DPG - self._gains_DPG[seen])
        self._move_unseen(before_DPG, depth, num_presets)
        self._rising_DPG = _rising(self._gains_DPG)
        self._num_seen_DP[seen] += num_requests
        self._last_seen_DP[seen] = self._num_cycles

    def _move_unseen(self, before_DPG: Array, depth: int, num_presets: int) -> None:
        """Let what was not seen follow what was.

        A wider tree keeps its lead. If the deepest level seen gains a factor, the chance to get one
        level further gains its root, so a level twice as deep gains the factor squared.
        """
        now_DPG = self._gains_DPG
        shift_DG = now_DPG[:depth, num_presets - 1] - before_DPG[:depth, num_presets - 1]
        now_DPG[:depth, num_presets:] += shift_DG[:, None]
        # Gains of each level on top of those above it, for every number of nodes.
        before_DPG = np.diff(before_DPG, axis=0, prepend=0.0).clip(min=0.0)
        level_PG = np.diff(now_DPG[:depth], axis=0, prepend=0.0)[-1].clip(min=0.0)
        factor_PG = ((level_PG + 0.01) / (before_DPG[depth - 1] + 0.01)).clip(0.5, 2.0)
        for below in range(depth, len(now_DPG)):
            moved_PG = before_DPG[below] * factor_PG ** ((below + 1) / depth)
            # Fewer walks get to a deeper level.
            level_PG = np.minimum(moved_PG, level_PG)
            now_DPG[below] = now_DPG[below - 1] + level_PG

    def _count_depths(self, report: CycleReport, kept: float) -> None:
        for counts_D, new_D in (
            (self._reached_D, report.reached_D),
            (self._accepted_D, report.accepted_D),
        ):
            for place, count in enumerate(counts_D):
                counts_D[place] = kept * count + (new_D[place] if place < len(new_D) else 0)


def _rising(gains_DPG: Array) -> Array:
    """Gains with that of no nodes before them, never less for a deeper or wider tree.

    A larger tree holds all nodes of a smaller one; what was seen long ago may not say less.
    """
    rising_DPG = np.maximum.accumulate(np.maximum.accumulate(gains_DPG, axis=0), axis=1)
    result: Array = np.concatenate([np.zeros_like(rising_DPG[..., :1]), rising_DPG], axis=-1)
    return result


def _assumed_gains(tree: TreeSettings, best: float) -> Array:
    """Gains of a head all of whose nodes have the same few likely children."""
    others = [(1.0 - best) * share for share in _ASSUMED_SHARES]
    probs = [best, *others, *(0.05 * (1.0 - best) / (rank + 1) for rank in range(tree.width))][
        : tree.width
    ]
    logprobs_W = torch.tensor(probs).log()
    levels = TreeLevels()
    tokens_W = torch.arange(tree.width)
    for level in range(tree.depth):
        shape = (1, tree.width) if level == 0 else (1, tree.width, tree.width)
        logprobs = logprobs_W.expand(shape)
        levels.add(known_children(tokens_W.expand(shape), logprobs, logprobs))
    gains_DPG = expected_gains(levels.candidates(), depth=tree.depth, width=tree.width)
    result: Array = gains_DPG.double().numpy()
    return result
