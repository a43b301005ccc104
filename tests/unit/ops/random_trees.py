"""Random draft trees for property tests, and the naive walks they are compared with."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fledge.ops.tree import TreeBatch

VOCAB_SIZE = 7


@dataclass(frozen=True)
class PlainTree:
    """One tree as lists: the root is node 0, siblings hold different tokens."""

    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to the given one, by walking up."""
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def children(self, node: int) -> list[int]:
        return [i for i in range(1, len(self.tokens)) if self.parents[i] == node]


@st.composite
def plain_trees(draw: st.DrawFn, max_nodes: int = 14) -> PlainTree:
    tokens = [draw(st.integers(0, VOCAB_SIZE - 1))]
    parents = [0]
    taken: list[set[int]] = [set()]
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        # The newest node is a likely parent, so that deep chains occur as well as wide stars.
        parent = draw(st.one_of(st.just(len(tokens) - 1), st.integers(0, len(tokens) - 1)))
        free = sorted(set(range(VOCAB_SIZE)) - taken[parent])
        if not free:
            continue
        token = draw(st.sampled_from(free))
        taken[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        taken.append(set())
    return PlainTree(tokens, parents)


def batched(trees: list[PlainTree], padding_token: int = 0) -> TreeBatch:
    """The trees side by side, padded to the widest."""
    width = max(len(tree.tokens) for tree in trees)

    def padded(row: list[int], filler: int) -> list[int]:
        return row + [filler] * (width - len(row))

    return TreeBatch(
        tokens_BN=torch.tensor([padded(tree.tokens, padding_token) for tree in trees]),
        parents_BN=torch.tensor([padded(tree.parents, 0) for tree in trees]),
        sizes_B=torch.tensor([len(tree.tokens) for tree in trees]),
        logprobs_BN=torch.zeros(len(trees), width),
        num_drafts=sum(len(tree.tokens) - 1 for tree in trees),
    )
