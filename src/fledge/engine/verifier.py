"""One target pass over the trees of all requests, then accept, then tidy the cache.

The root of a tree is the newest committed token; it sits at its own place in the slot table, the
drafted nodes behind it. After the walk the accepted nodes move to where their tokens belong.

    table    [.. t3 | root a b c d]   accepted: root -> b -> d
    becomes  [.. t3 | root b d ...]   the bonus token is the next root and has no cache entry yet
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from fledge.contracts.settings import AcceptRule
from fledge.engine.sequence import Sequence
from fledge.models.target import Target
from fledge.ops.accept import Walk, walk_gumbel, walk_rejection
from fledge.ops.kv import KVPool
from fledge.ops.logit_rules import LogitRules, RequestRules, TokenCounts, make_rules
from fledge.ops.packed import SequencePart, pack
from fledge.ops.sampling import SamplingBatch, make_sampling_batch
from fledge.ops.tree import TreeBatch, ancestors, root_only

WalkRule = Callable[[Tensor, Tensor, TreeBatch, SamplingBatch, Tensor, LogitRules | None], Walk]
_RULES: dict[AcceptRule, WalkRule] = {"gumbel": walk_gumbel, "rejection": walk_rejection}


class Verifier:
    """Runs the target for a batch of sequences and commits what it says."""

    def __init__(self, target: Target, accept: AcceptRule, taps: tuple[int, ...]) -> None:
        self._target = target
        self._walk = _RULES[accept]
        self._taps = taps
        self._pool = KVPool()

    def grow_cache(self, num_slots: int) -> None:
        self._pool.grow(num_slots)

    def prefill(self, sequences: Many[Sequence]) -> None:
        """Read whole prompts and commit the first token of each answer."""
        packed = pack([_prompt_part(seq) for seq in sequences])
        last_rows = [segment.rows.stop - 1 for segment in packed.segments]
        output = self._target.forward(
            packed,
            self._pool,
            logit_rows_R=torch.tensor(last_rows, device=self._target.device),
            taps=self._taps,
        )
        # A prompt's last token is a tree without drafts; only its own row has logits.
        rows_B = torch.arange(len(sequences), device=self._target.device)
        trees = root_only(packed.token_ids_T[last_rows])
        walk = self._apply_rule(sequences, output.logits_RV, rows_B, trees)
        for seq, tokens in zip(sequences, _emitted(walk), strict=True):
            seq.commit(tokens)
        if output.features_TF is not None:
            for seq, segment in zip(sequences, packed.segments, strict=True):
                seq.unread_features_NF = output.features_TF[segment.rows]

    def verify(self, sequences: Many[Sequence], trees: TreeBatch) -> None:
        """Check the drafts of every request and commit what the target says."""
        seen_BNN = ancestors(trees.parents_BN)
        packed = pack(
            [
                self._tree_part(seq, trees.tokens_BN[i, :size], seen_BNN[i, :size, :size])
                for i, (seq, size) in enumerate(zip(sequences, trees.sizes_B.tolist(), strict=True))
            ]
        )
        output = self._target.forward(packed, self._pool, taps=self._taps)
        first_rows = [segment.start for segment in packed.segments]
        rows_B = torch.tensor(first_rows, device=self._target.device)
        walk = self._apply_rule(sequences, output.logits_RV, rows_B, trees)
        moves = []
        for seq, first_row, tokens, nodes_L in zip(
            sequences, first_rows, _emitted(walk), walk.nodes_BL, strict=True
        ):
            root_index = seq.len - 1
            seq.cycles += 1
            count = seq.commit(tokens)
            moves.append((seq, root_index, nodes_L[:count]))
            if output.features_TF is not None:
                seq.unread_features_NF = output.features_TF[first_row + nodes_L[:count]]
        self._compact(moves)

    def _tree_part(self, seq: Sequence, tokens_N: Tensor, seen_NN: Tensor) -> SequencePart:
        """Committed tokens are seen by every node, drafted ones by those below them."""
        num_nodes, device = tokens_N.shape[0], tokens_N.device
        root = seq.len - 1
        context = torch.arange(root, device=device)
        # Nodes past the end of the context are never committed, but their positions must exist.
        last = self._target.context_len - 1
        positions_N = (root + seen_NN.sum(dim=1) - 1).clamp(max=last)
        visible_QK = None
        if num_nodes > 1:
            sees_context = torch.ones(num_nodes, root, dtype=torch.bool, device=device)
            visible_QK = torch.cat([sees_context, seen_NN], dim=1)
        return SequencePart(
            token_ids_Q=tokens_N,
            positions_Q=positions_N,
            key_slots_K=seq.table.slice(0, root + num_nodes),
            key_positions_K=torch.cat([context, positions_N]),
            visible_QK=visible_QK,
        )

    def _apply_rule(
        self, sequences: Many[Sequence], logits_RV: Tensor, rows_B: Tensor, trees: TreeBatch
    ) -> Walk:
        params = [seq.request.params for seq in sequences]
        device = logits_RV.device
        positions_B = torch.tensor([len(seq.output_ids) for seq in sequences], device=device)
        counts = TokenCounts(logits_RV.shape[-1], device)
        rules = make_rules(
            [
                RequestRules(
                    s.request.params,
                    s.request.prompt_token_ids,
                    s.output_ids,
                    s.request.eos_token_ids,
                    counts,
                )
                for s in sequences
            ]
        )
        nodes_N = torch.arange(trees.max_size, device=device)
        return self._walk(
            logits_RV,
            rows_B[:, None] + nodes_N,
            trees,
            make_sampling_batch(params, device),
            positions_B,
            rules,
        )

    def _compact(self, moves: list[tuple[Sequence, int, Tensor]]) -> None:
        """Put the accepted nodes' cache entries where their tokens belong."""
        sources = [seq.table.slots[root + nodes_L] for seq, root, nodes_L in moves]
        targets = [seq.table.slice(root, root + nodes_L.shape[0]) for seq, root, nodes_L in moves]
        from_slots, to_slots = torch.cat(sources), torch.cat(targets)
        if not torch.equal(from_slots, to_slots):
            self._pool.move(from_slots, to_slots)


def _emitted(walk: Walk) -> list[list[int]]:
    """Tokens of each request on the host."""
    lengths = walk.lengths_B.tolist()
    rows = walk.tokens_BL.tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _prompt_part(seq: Sequence) -> SequencePart:
    device = seq.table.slots.device
    prompt = seq.request.prompt_token_ids
    positions = torch.arange(len(prompt), device=device)
    return SequencePart(
        token_ids_Q=torch.tensor(prompt, device=device),
        positions_Q=positions,
        key_slots_K=seq.table.slice(0, len(prompt)),
        key_positions_K=positions,
    )
