"""Who proposes tokens. The engine asks a drafter for one tree per request and verifies them.

`HeadDrafter` grows trees with an EAGLE-3 head: it first extends the head's cache over the tokens
the target accepted, with the target's own features, then expands level by level.

Legend: B requests, T packed tokens, W tree width, D hidden size, V draft vocabulary.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor

from fledge.contracts.settings import TreeSettings
from fledge.engine.sequence import Sequence
from fledge.engine.tree_levels import TreeLevels
from fledge.models.attention import attend_packed
from fledge.models.head import Eagle3Head, HeadOutput
from fledge.models.target import Target
from fledge.ops.attention import AttentionSpec
from fledge.ops.kv import KVPool
from fledge.ops.packed import PackedPass, SequencePart, pack
from fledge.ops.tree import TreeBatch, root_only, select_trees


class Drafter(Protocol):
    """Proposes what the target may say next."""

    taps: tuple[int, ...]
    """Completed target layers whose features it reads; empty for none."""

    num_scratch: int
    """Cache slots a request needs behind its newest token during a cycle."""

    def grow_cache(self, num_slots: int) -> None:
        """The engine's slots have grown to this many."""

    def draft(self, sequences: Many[Sequence]) -> TreeBatch:
        """One tree per request, rooted at its newest token."""


def root_tokens(sequences: Many[Sequence], device: torch.device) -> Tensor:
    return torch.tensor([seq.newest_token_id for seq in sequences], device=device)


class NoDrafter:
    """Plain decoding: every tree is a root."""

    taps: tuple[int, ...] = ()
    num_scratch = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def grow_cache(self, num_slots: int) -> None:
        del num_slots

    def draft(self, sequences: Many[Sequence]) -> TreeBatch:
        return root_only(root_tokens(sequences, self._device))


class HeadDrafter:
    """Draft trees from an EAGLE-3 head."""

    def __init__(self, head: Eagle3Head, target: Target, settings: TreeSettings) -> None:
        self._head = head
        self._embedding = target.embedding.weight
        self._width = min(settings.width, head.config.draft_vocab_size)
        self._depth = settings.depth
        self._budget = settings.budget
        self._pool = KVPool()
        self._attention = AttentionSpec(
            scale=head.config.head_dim**-0.5, window=head.config.sliding_window
        )
        self.taps = head.config.resolve_taps(target.num_layers)
        self.num_scratch = settings.num_scratch

    def grow_cache(self, num_slots: int) -> None:
        self._pool.grow(num_slots)

    @torch.no_grad()
    def draft(self, sequences: Many[Sequence]) -> TreeBatch:
        output = self._extend(sequences)
        levels = TreeLevels(self._width)
        frontier_BWD = output.feedback_TD[:, None].expand(-1, self._width, -1)
        levels.add_first(*self._top_children(output.normed_TD))
        for level in range(1, self._depth):
            output = self._step(sequences, levels, frontier_BWD, level)
            shape = (len(sequences), self._width, -1)
            levels.add(*(part.view(shape) for part in self._top_children(output.normed_TD)))
            frontier_BWD = output.feedback_TD.view(shape).gather(
                1, levels.frontier_rows_BW[:, :, None].expand(-1, -1, output.feedback_TD.shape[-1])
            )
        return select_trees(
            root_tokens(sequences, self._embedding.device),
            levels.candidates(),
            num_nodes=self._budget * len(sequences),
            max_nodes=self._budget,
        )

    def _extend(self, sequences: Many[Sequence]) -> HeadOutput:
        """Add the newly committed tokens to the head's cache; returns its output at the roots."""
        parts, features = [], []
        for seq in sequences:
            assert seq.unread_features_NF is not None, "the target pass left no features"
            features.append(seq.unread_features_NF)
            parts.append(_committed_part(seq, seq.unread_features_NF.shape[0]))
            seq.unread_features_NF = None
        packed = pack(parts)
        output = self._run(packed, self._head.fuse(torch.cat(features)))
        last_rows = [segment.rows.stop - 1 for segment in packed.segments]
        return HeadOutput(output.feedback_TD[last_rows], output.normed_TD[last_rows])

    def _step(
        self, sequences: Many[Sequence], levels: TreeLevels, hidden_BWD: Tensor, level: int
    ) -> HeadOutput:
        """Run the head on the frontier nodes of every tree."""
        parts = [
            _frontier_part(seq, tokens_W, visible_WS, level)
            for seq, tokens_W, visible_WS in zip(
                sequences, levels.frontier_tokens_BW, levels.visible_BWS, strict=True
            )
        ]
        return self._run(pack(parts), hidden_BWD.reshape(-1, hidden_BWD.shape[-1]))

    def _run(self, packed: PackedPass, hidden_TD: Tensor) -> HeadOutput:
        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_packed(packed, self._pool, 0, query, keys, values, self._attention)

        embeds_TD = self._head.embed(packed.token_ids_T, self._embedding)
        output: HeadOutput = self._head(embeds_TD, hidden_TD, packed.positions_T, attend)
        return output

    def _top_children(self, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Target tokens and log-probabilities of the best children of each row, [T, W] each."""
        logprobs_TV = self._head.logits(normed_TD).float().log_softmax(dim=-1)
        top = logprobs_TV.topk(self._width, dim=-1)
        # Neither rounding nor a head that overflows may lift a child above its parent.
        logprobs_TW = top.values.clamp(max=0.0).nan_to_num(nan=float("-inf"))
        return self._head.draft_to_target_V[top.indices], logprobs_TW


def _committed_part(seq: Sequence, count: int) -> SequencePart:
    """The newest `count` committed tokens as the head sees them: entry 0 does not exist."""
    device = seq.table.slots.device
    positions = torch.arange(1, seq.len, device=device)
    tokens = (seq.request.prompt_token_ids + tuple(seq.output_ids))[-count:]
    return SequencePart(
        token_ids_Q=torch.tensor(tokens, device=device),
        positions_Q=positions[-count:],
        key_slots_K=seq.table.slice(1, seq.len),
        key_positions_K=positions,
    )


def _frontier_part(seq: Sequence, tokens_W: Tensor, visible_WS: Tensor, level: int) -> SequencePart:
    """The frontier of one tree: all committed entries are visible, then the node's own path."""
    width, device = tokens_W.shape[0], tokens_W.device
    context = torch.arange(1, seq.len, device=device)
    scratch = seq.len - 1 + torch.arange(1, level + 1, device=device).repeat_interleave(width)
    sees_context = torch.ones(width, seq.len - 1, dtype=torch.bool, device=device)
    return SequencePart(
        token_ids_Q=tokens_W,
        positions_Q=scratch[-width:],
        key_slots_K=seq.table.slice(1, seq.len + level * width),
        key_positions_K=torch.cat([context, scratch]),
        visible_QK=torch.cat([sees_context, visible_WS], dim=1),
    )
