"""Walks that accept drafts by coins with given chances, whatever the target says: for measuring.

What an engine can do with a head depends on how often its drafts are right. To measure the engine
alone, with weights that mean nothing, the chances are given: that the first child of a node at each
depth is right once its parent was, and that a sibling is right once all before it were wrong.
Smaller trees then honestly earn less. Texts are meaningless.

Legend: B requests, N nodes, L levels of a walk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.errors import ConfigError
from fledge.ops.accept import Walk, walk_gumbel
from fledge.ops.logit_rules import LogitRules
from fledge.ops.noise import uniform
from fledge.ops.sampling import SamplingBatch
from fledge.ops.tree import TreeBatch, depths, is_real

_STREAM = 7


@dataclass(frozen=True, slots=True)
class SyntheticWalk:
    """A rule for walks, in place of `walk_gumbel`."""

    first: float | tuple[float, ...]
    """Chance of a node's first child, given the node; one for all depths, or one for each, the last
    of which holds below it too."""

    sibling: float = 0.0
    """Chance of each further child, given that those before it were wrong."""

    def __post_init__(self) -> None:
        if not self._by_depth:
            raise ConfigError("the chances first are none; give one a depth, or one number.")
        for name, values in (("first", self._by_depth), ("sibling", (self.sibling,))):
            for value in values:
                if not 0.0 <= value <= 1.0:
                    raise ConfigError(f"the chance {name} is {value}; it must be between 0 and 1.")

    @property
    def _by_depth(self) -> tuple[float, ...]:
        return self.first if isinstance(self.first, tuple) else (self.first,)

    def __call__(
        self,
        logits_RV: Tensor,
        rows_BN: Tensor,
        tree: TreeBatch,
        batch: SamplingBatch,
        position_B: Tensor,
        rules: LogitRules | None = None,
        *,
        max_depth: int | None = None,
    ) -> Walk:
        """The real walk is made too, so that its cost is there; its first token ends every walk."""
        real = walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, rules, max_depth=max_depth)
        num_levels = min(tree.max_size, 1 + (max_depth or 0))
        if num_levels == 1:
            return real
        is_right_BN = self._right_nodes(tree, batch.seed_B, position_B)
        node_B = torch.zeros_like(position_B)
        lengths_B = torch.ones_like(position_B)
        is_walking_B = torch.ones_like(position_B, dtype=torch.bool)
        tokens, nodes = [], [node_B]
        for _ in range(num_levels - 1):
            is_next_BN = (tree.parents_BN == node_B[:, None]) & is_right_BN
            child_B = is_next_BN.int().argmax(dim=1)
            is_walking_B = is_walking_B & is_next_BN.any(dim=1)
            node_B = torch.where(is_walking_B, child_B, node_B)
            lengths_B = lengths_B + is_walking_B
            tokens.append(tree.tokens_BN.gather(1, node_B[:, None])[:, 0])
            nodes.append(node_B)
        tokens_BL = torch.stack([*tokens, real.tokens_BL[:, 0]], dim=1)
        tokens_BL = tokens_BL.scatter(1, lengths_B[:, None] - 1, real.tokens_BL[:, :1])
        return Walk(tokens_BL, torch.stack(nodes, dim=1), lengths_B, real.failed_B, None)

    def _right_nodes(self, tree: TreeBatch, seed_B: Tensor, position_B: Tensor) -> Tensor:
        """Boolean [B, N]: nodes whose coin says yes; the first of siblings has its own chance."""
        coins_BN = uniform(seed_B, position_B, tree.max_size, _STREAM)
        index_N = torch.arange(tree.max_size, device=seed_B.device)
        is_earlier_NN = index_N[None, :] < index_N[:, None]
        has_same_parent_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None, :]
        # The root is written as its own parent, and is nobody's sibling.
        before_BN = (has_same_parent_BNN & is_earlier_NN & (index_N > 0)).any(dim=2)
        *shallow, deepest = self._by_depth
        chance_BN = torch.full_like(coins_BN, deepest)
        if shallow:
            depth_BN = depths(tree.parents_BN)
            for depth, chance in enumerate(shallow, start=1):
                chance_BN = torch.where(depth_BN == depth, chance, chance_BN)
        chance_BN = torch.where(before_BN, self.sibling, chance_BN)
        return (coins_BN < chance_BN) & is_real(tree) & (index_N > 0)
