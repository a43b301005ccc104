"""Draft trees made of numbers, with what the target says to them.

A tree bank holds draft trees with conditional probabilities drawn node by node and, for each node,
which child (or none) the target chooses. Trees of smaller depth and width are cut out of them by
the rules of drafting, so the yield of every plan on the same trees is known: exactly in
expectation, and as drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fledge.contracts.settings import TreeSettings
from fledge.engine.calibration import Calibration
from fledge.engine.draft_gains import expected_gains, width_presets
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.tree_levels import TreeLevels
from fledge.ops.accept import Walk
from fledge.ops.draft_level import known_children
from fledge.ops.tree import Candidates, TreeBatch, is_real, select_trees
from tests.unit.engine.simulated_machines import MAX_PASS_TOKENS, Array

TREE = TreeSettings(depth=6, width=4, budget=40)
_NUM_TREES = 1024


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How good drafts are: the mean probability of a node's best child, per kind of request."""

    name: str
    kinds: tuple[float, ...]
    spread: float = 4.0
    """Small: nodes differ much; large: all nodes are alike."""


ACCURACIES = (
    Accuracy("poor", (0.2,)),
    Accuracy("middling", (0.6,)),
    Accuracy("good", (0.85,)),
    Accuracy("sampled", (0.5,), spread=20.0),
    Accuracy("mixed", (0.2, 0.6, 0.9)),
)


def draw_conditionals(
    accuracy: Tensor, shape: tuple[int, ...], spread: float, random: np.random.Generator
) -> Tensor:
    """Probabilities of the children of nodes, best first; [R, ..., W] with R accuracies."""
    mean = accuracy.numpy().reshape(-1, *[1] * (len(shape) - 2))
    best = random.beta(spread * mean, spread * (1 - mean), size=shape[:-1]).clip(1e-3, 0.999)
    shares = 0.45 * 0.5 ** np.arange(shape[-1] - 1)
    rest = np.minimum((1 - best)[..., None] * shares, best[..., None])
    return torch.from_numpy(np.concatenate([best[..., None], rest], axis=-1)).float()


@dataclass(slots=True)
class Forest:
    """Trees of all candidates, and what the target says to them."""

    candidates: Candidates
    """Tokens are the candidates' own indices."""

    true_RC: Tensor
    """Log-probability that the walk comes by."""

    accepted_RC: Tensor
    """Whether it does."""

    level_C: Tensor


Belief = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Of the true probabilities at a depth: the drafter's log-probabilities, and those calibrated."""


def knows_the_truth(probs: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    del depth
    return probs.log(), probs.log()


def grow_forest(
    accuracy_R: Tensor,
    spread: float,
    tree: TreeSettings,
    random: np.random.Generator,
    belief: Belief = knows_the_truth,
) -> Forest:
    """One tree per accuracy, expanded by what the drafter believes."""
    num_rows, width = len(accuracy_R), tree.width
    levels = TreeLevels()
    rank_W = torch.arange(width)
    accepted, true = [], []
    for level in range(tree.depth):
        shape = torch.Size([num_rows, width] + [width] * min(level, 1))
        probs = draw_conditionals(accuracy_R * 0.98**level, shape, spread, random)
        drawn = torch.from_numpy(random.random(shape[:-1])).float()
        is_chosen = (drawn[..., None] < probs.cumsum(-1)).int().argmax(-1, keepdim=True) == rank_W
        is_chosen &= (drawn < probs.sum(-1))[..., None]
        believed, calibrated = belief(probs, level + 1)
        first = 0 if level == 0 else width + (level - 1) * width**2
        tokens = (first + torch.arange(shape[1:].numel())).view(shape[1:]).expand(shape)
        levels.add(known_children(tokens, believed, calibrated))
        if level == 0:
            accepted, true = [is_chosen], [probs.log()]
            continue
        parents = levels.candidates().parents_BC[:, -width * width :]
        came_by = torch.cat(accepted, dim=1).gather(1, parents)
        accepted.append(is_chosen.flatten(1) & came_by)
        true.append(torch.cat(true, dim=1).gather(1, parents) + probs.log().flatten(1))
    sizes = torch.tensor([width] + [width**2] * (tree.depth - 1))
    level_C = torch.arange(tree.depth).repeat_interleave(sizes)
    return Forest(levels.candidates(), torch.cat(true, 1), torch.cat(accepted, 1), level_C)


def _members(candidates: Candidates, tree: TreeSettings, preset: int) -> Tensor:
    """Which candidates a narrower tree scores: best children of the best nodes of each level."""
    width, num_rows = tree.width, candidates.scores_BC.shape[0]
    is_member = [torch.arange(width).expand(num_rows, -1) < preset]
    is_expanded = is_member[0]
    first = width
    for _ in range(1, tree.depth):
        last = first + width * width
        parents = candidates.parents_BC[:, first:last]
        is_best_child = torch.arange(width).repeat(width) < preset
        now = is_expanded.gather(1, parents) & is_best_child
        scores = candidates.scores_BC[:, first:last].masked_fill(~now, -torch.inf)
        best = scores.topk(preset, dim=1).indices
        is_expanded = torch.cat(
            [
                torch.zeros(num_rows, first, dtype=torch.bool),
                torch.zeros_like(now).scatter(1, best, True),
            ],
            dim=1,
        ) & torch.cat([torch.ones(num_rows, first, dtype=torch.bool), now], dim=1)
        is_member.append(now)
        first = last
    return torch.cat(is_member, dim=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the drafts of one cycle."""

    num_drafted: int = 0
    expected: float = 0.0
    """Accepted drafts to be expected by the true probabilities."""

    reached_D: tuple[int, ...] = ()
    accepted_D: tuple[int, ...] = ()
    gains: Tensor | None = None


class Trees(Protocol):
    """Draft trees for a load."""

    num_requests: int
    num_batches: int

    def outcome(self, plan: DraftPlan, batch: int) -> Outcome:
        """Draft by a plan, verify, walk."""


class TreeBank:
    """Batches of trees for one load, with the yield of every plan on each of them."""

    def __init__(
        self,
        accuracy: Accuracy,
        num_requests: int,
        tree: TreeSettings = TREE,
        seed: int = 0,
        num_trees: int = _NUM_TREES,
    ) -> None:
        random = np.random.default_rng(seed)
        self.accuracy = accuracy
        self.num_requests = num_requests
        self._parts: dict[int, TreeBank] = {}
        self.num_batches = max(4, num_trees // num_requests)
        self.tree = tree
        kinds = torch.tensor(accuracy.kinds).repeat(num_requests // len(accuracy.kinds) + 1)
        accuracy_R = kinds[:num_requests].repeat(self.num_batches)
        forest = grow_forest(accuracy_R, accuracy.spread, tree, random)
        self.max_nodes = min(tree.budget * num_requests, MAX_PASS_TOKENS - num_requests)
        self.widths = width_presets(tree.width)
        self._expected: dict[tuple[int, int], Array] = {}
        self._accepted: dict[tuple[int, int], Array] = {}
        for depth in range(1, tree.depth + 1):
            for width in self.widths:
                self._tabulate(forest, depth, width)
        self._gains = [
            self._batch_gains(forest.candidates, batch) for batch in range(self.num_batches)
        ]

    def _part(self, num_drafted: int | None) -> "TreeBank":
        """The bank of a probe that drafts for some requests only."""
        if num_drafted is None or num_drafted == self.num_requests:
            return self
        if num_drafted not in self._parts:
            self._parts[num_drafted] = TreeBank(
                self.accuracy, num_drafted, self.tree, seed=1, num_trees=_NUM_TREES // 4
            )
        return self._parts[num_drafted]

    def outcome(self, plan: DraftPlan, batch: int) -> Outcome:
        if plan.is_plain:
            return Outcome()
        part = self._part(plan.num_drafted)
        batch %= part.num_batches
        expected = part._expected[plan.depth, plan.width][batch]
        accepted = part._accepted[plan.depth, plan.width][batch]
        nodes = min(plan.nodes, len(expected) - 1)
        presets = len(width_presets(plan.width))
        return Outcome(
            num_drafted=part.num_requests,
            expected=float(expected[nodes]),
            # The controller needs their sum only.
            reached_D=(part.num_requests,),
            accepted_D=(round(accepted[nodes]),),
            gains=part._gains[batch][: plan.depth, :presets] if plan.is_measured else None,
        )

    def mean_expected(self, depth: int, width: int) -> Array:
        """Expected accepted drafts against the number of nodes, over all batches."""
        return self._expected[depth, width].mean(axis=0)

    def _tabulate(self, forest: Forest, depth: int, width: int) -> None:
        is_in = _members(forest.candidates, self.tree, width) & (forest.level_C < depth)
        scores = forest.candidates.scores_BC.masked_fill(~is_in, -torch.inf)
        scores = scores.view(self.num_batches, -1)
        best = scores.topk(min(self.max_nodes, scores.shape[1]), dim=1)
        taken = forest.accepted_RC.reshape(self.num_batches, -1).gather(1, best.indices)
        taken = taken & best.values.isfinite()
        zero = torch.zeros(self.num_batches, 1)
        expected = torch.cat([zero, best.values.exp().cumsum(1)], dim=1)
        accepted = torch.cat([zero, taken.float().cumsum(1)], dim=1)
        self._expected[depth, width] = expected.double().numpy()
        self._accepted[depth, width] = accepted.double().numpy()

    def _batch_gains(self, candidates: Candidates, batch: int) -> Tensor:
        rows = slice(batch * self.num_requests, (batch + 1) * self.num_requests)
        part = Candidates(
            tokens_BC=candidates.tokens_BC[rows],
            scores_BC=candidates.scores_BC[rows],
            logprobs_BC=candidates.logprobs_BC[rows],
            parents_BC=candidates.parents_BC[rows],
        )
        return expected_gains(part, depth=self.tree.depth, width=self.tree.width)


class LiveTrees:
    """Trees drawn anew in each cycle by a drafter that misjudges itself, and its calibration.

    The drafter says p ** confidence where p is true: below 1 it promises too much.
    """

    num_batches = 1

    def __init__(
        self,
        accuracy: Accuracy,
        num_requests: int,
        *,
        confidence: float,
        calibration: Calibration | None = None,
        num_sampled: int = 0,
        seed: int = 0,
    ) -> None:
        self.num_requests = num_requests
        self.confidence = confidence
        self.calibration = calibration
        self._spread = accuracy.spread
        kinds = torch.tensor(accuracy.kinds).repeat(num_requests // len(accuracy.kinds) + 1)
        self._accuracy_B = kinds[:num_requests]
        self._sampled_B = torch.arange(num_requests) < num_sampled
        self._random = np.random.default_rng(seed)
        self._num_drafted = 0

    def outcome(self, plan: DraftPlan, batch: int) -> Outcome:
        del batch
        if plan.is_plain:
            return Outcome()
        count = self.num_requests if plan.num_drafted is None else plan.num_drafted
        sampled_B = self._sampled_B[:count]

        def belief(probs: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            believed = self.confidence * probs.log()
            if self.calibration is None:
                return believed, believed
            return believed, self.calibration.apply(believed, depth, sampled_B)

        shape = replace(TREE, depth=plan.depth, width=plan.width)
        forest = grow_forest(self._accuracy_B[:count], self._spread, shape, self._random, belief)
        tree = select_trees(
            torch.zeros(count, dtype=torch.long),
            forest.candidates,
            num_nodes=plan.nodes,
            max_nodes=TREE.budget,
        )
        walk, reached_D, accepted_D = walk_forest(tree, forest)
        self._num_drafted += 1
        if self.calibration is not None:
            self.calibration.observe(tree, walk, sampled_B)
            if self._num_drafted % 32 == 0:
                self.calibration.refresh()
        is_draft_BN = is_real(tree).index_fill(1, torch.tensor([0]), False)
        true_BN = forest.true_RC.gather(1, tree.tokens_BN).exp()
        gains = expected_gains(forest.candidates, depth=plan.depth, width=plan.width)
        return Outcome(
            num_drafted=count,
            expected=float(true_BN[is_draft_BN].sum()),
            reached_D=reached_D,
            accepted_D=accepted_D,
            gains=gains if plan.is_measured else None,
        )


def walk_forest(tree: TreeBatch, forest: Forest) -> tuple[Walk, tuple[int, ...], tuple[int, ...]]:
    """The walks through trees cut out of a forest; walks that reached and accepted each depth."""
    is_draft_BN = is_real(tree).index_fill(1, torch.tensor([0]), False)
    taken_BN = forest.accepted_RC.gather(1, tree.tokens_BN) & is_draft_BN
    depth_BN = forest.level_C[tree.tokens_BN] + 1
    max_depth = int(forest.level_C.max()) + 1
    nodes = [torch.zeros(tree.num_requests, dtype=torch.long)]
    reached, accepted = [], []
    walking_B = torch.ones(tree.num_requests, dtype=torch.bool)
    for depth in range(1, max_depth + 1):
        has_child_B = ((tree.parents_BN == nodes[-1][:, None]) & is_draft_BN).any(dim=1)
        reached.append(int((walking_B & has_child_B).sum()))
        here_BN = taken_BN & (depth_BN == depth)
        walking_B = here_BN.any(dim=1)
        accepted.append(int(walking_B.sum()))
        nodes.append(torch.where(walking_B, here_BN.int().argmax(dim=1), nodes[-1]))
    walk = Walk(
        tokens_BL=torch.zeros(tree.num_requests, max_depth + 1, dtype=torch.long),
        nodes_BL=torch.stack(nodes, dim=1),
        lengths_B=1 + taken_BN.sum(dim=1),
        failed_B=torch.zeros(tree.num_requests, dtype=torch.bool),
        logprobs=None,
    )
    return walk, tuple(reached), tuple(accepted)
