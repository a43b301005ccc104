"""What the nodes of one pass may be followed by, for the requests that have a grammar.

Every node that a walk may reach has a mask of its own: the grammar's state after the path to it.
Drafts that the grammar forbids are never reached, since the mask of their parent forbids them, and
neither is what hangs below them. Drafts that were not looked at, to save time, are closed: no walk
enters them. So drafts decide how far a pass gets, and never what is said.

Masks are made on the host while the device runs the pass; only what was drafted has to be read.

Legend: B requests with logits, N nodes of a tree, R rows of logits, M masked nodes, Y bytes of a
mask, V vocabulary.
"""

import time
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.grammar import GrammarState
from fledge.engine.sequence import Sequence
from fledge.ops.accept import Walk
from fledge.ops.grammar_mask import mask_rows
from fledge.ops.logprobs import walk_logprobs
from fledge.ops.sampling import SamplingBatch
from fledge.ops.tree import TreeBatch

_MAX_DRAFTS = 96
_MAX_DRAFT_S = 0.005
"""How many drafts are looked at in a pass, and for how long; roots always are."""


def begin_masks(walkers: Many[Sequence], trees: TreeBatch | None) -> "PassMasks | None":
    """Ask for what was drafted, before the pass is started; None when no request has a grammar."""
    chosen = [number for number, seq in enumerate(walkers) if seq.grammar is not None]
    return PassMasks(walkers, chosen, trees) if chosen else None


class _Node(NamedTuple):
    request: int
    node: int


class PassMasks:
    """The masks of one pass."""

    def __init__(self, walkers: Many[Sequence], chosen: list[int], trees: TreeBatch | None) -> None:
        self._walkers, self._chosen = walkers, chosen
        self._drafting: list[int] = []
        self._drafts: Tensor | None = None
        self._event: torch.Event | None = None
        if trees is not None:
            self._drafting = [number for number in chosen if number < trees.num_requests]
        if trees is not None and self._drafting:
            device = trees.tokens_BN.device
            picked = torch.tensor(self._drafting, device=device)
            drafts_3BN = torch.stack(
                [
                    trees.tokens_BN[picked],
                    trees.parents_BN[picked],
                    trees.sizes_B[picked][:, None].expand(-1, trees.max_size),
                ]
            )
            self._drafts = drafts_3BN.to("cpu", non_blocking=True)
            if device.type == "cuda":
                self._event = torch.Event(device)
                self._event.record()
        self._rows_M: Tensor | None = None
        self._raw_MV: Tensor | None = None

    def apply(
        self, logits_RV: Tensor, rows_BN: Tensor, trees: TreeBatch, *, keeps_raw: bool
    ) -> TreeBatch:
        """Mask the logits in place; returns the trees with what must not be entered closed.

        A request whose grammar cannot be followed any more gets its error; others go on.
        """
        nodes, masks, closed = self._look()
        device = logits_RV.device
        places_2M = torch.tensor(nodes, device=device).T
        rows_M = self._rows_M = rows_BN[places_2M[0], places_2M[1]]
        if keeps_raw:
            self._raw_MV = logits_RV[rows_M]
        masks_MY = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
        masks_MY = masks_MY.view(len(masks), -1)
        if device.type == "cuda":
            masks_MY = masks_MY.pin_memory().to(device, non_blocking=True)
        mask_rows(logits_RV, rows_M, masks_MY)
        if not closed:
            return trees
        tokens_BN = trees.tokens_BN.clone()
        closed_2C = torch.tensor(closed, device=device).T
        tokens_BN[closed_2C[0], closed_2C[1]] = -1
        return replace(trees, tokens_BN=tokens_BN)

    def with_raw_logprobs(
        self, walk: Walk, logits_RV: Tensor, rows_BN: Tensor, batch: SamplingBatch
    ) -> Walk:
        """The walk with logprobs of the target's own logits, as they are without a grammar."""
        if self._raw_MV is None or self._rows_M is None or batch.asking_A is None:
            return walk
        logits_RV.index_copy_(0, self._rows_M, self._raw_MV)
        rows_BL = rows_BN.gather(1, walk.nodes_BL)
        logprobs = walk_logprobs(
            logits_RV, rows_BL, walk.tokens_BL, batch.asking_A, batch.num_logprobs
        )
        return replace(walk, logprobs=logprobs)

    def _look(self) -> tuple[list[_Node], list[bytes], list[_Node]]:
        """Nodes with their masks, and nodes that nobody may enter."""
        nodes, masks = [], []
        for number in self._chosen:
            state = _state(self._walkers[number])
            nodes.append(_Node(number, 0))
            masks.append(state.matcher.compute_bitmask())
        closed: list[_Node] = []
        if self._drafts is not None:
            if self._event is not None:
                self._event.synchronize()
            tokens, parents, sizes = self._drafts.tolist()
            stop = time.perf_counter() + _MAX_DRAFT_S
            for place, number in enumerate(self._drafting):
                seq = self._walkers[number]
                looker = _TreeLooker(_state(seq), seq.request.eos_token_ids)
                num_left = (_MAX_DRAFTS - len(masks) + len(self._chosen)) // (
                    len(self._drafting) - place
                )
                size = sizes[place][0]
                looker.look(tokens[place][:size], parents[place][:size], num_left, stop)
                nodes += [_Node(number, node) for node in looker.masks]
                masks += looker.masks.values()
                closed += [
                    _Node(number, node) for node in range(1, size) if node not in looker.entered
                ]
        self._note_errors()
        return nodes, masks, closed

    def _note_errors(self) -> None:
        for number in self._chosen:
            seq = self._walkers[number]
            seq.error = seq.error or _state(seq).error


class _TreeLooker:
    """Follows the grammar down one tree, and leaves it where it was."""

    def __init__(self, state: GrammarState, ends: frozenset[int]) -> None:
        self._state, self._ends = state, ends
        self.masks: dict[int, bytes] = {}
        self.entered: set[int] = set()
        """Nodes that a walk may go to, those without a mask because the answer ends there too."""

    def look(self, tokens: list[int], parents: list[int], max_nodes: int, stop: float) -> None:
        matcher = self._state.matcher
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            children.setdefault(parents[node], []).append(node)
        # Children come in the order of their promise: the best path is looked at first.
        pending = list(reversed(children.get(0, [])))
        path: list[int] = []
        while pending and len(self.masks) < max_nodes and time.perf_counter() <= stop:
            node = pending.pop()
            while path and path[-1] != parents[node]:
                path.pop()
                matcher.rollback(1)
            if tokens[node] in self._ends:
                self.entered.add(node)
            elif matcher.try_consume_tokens([tokens[node]]):
                path.append(node)
                if not matcher.is_stopped():
                    self.masks[node] = matcher.compute_bitmask()
                    pending.extend(reversed(children.get(node, [])))
                if matcher.is_error():
                    # A draft asked too much of the grammar. The answer may never go there.
                    self.masks.pop(node, None)
                    self._state.recover()
                    return
                self.entered.add(node)
        if path:
            matcher.rollback(len(path))


def _state(seq: Sequence) -> GrammarState:
    assert seq.grammar is not None
    return seq.grammar
