"""One target pass over everything that is due: trees, prompt chunks, then accept and tidy up.

The root of a tree is the newest committed token; its number is its place in the block table, and
the drafted nodes are stored behind it. After the walk the accepted nodes move to where their tokens
belong. A prompt's last token is a root without drafts.

    numbers  [.. t3 | root a b c d]   accepted: root -> b -> d
    becomes  [.. t3 | root b d ...]   the bonus token is the next root and has no cache entry yet

Rows of a pass, in this order: requests that draft, requests that decode plainly, requests that
finish reading, requests that read on. Only the first three have logits.

Legend: B requests with logits, R rows with logits, N nodes of a tree with its root, L levels.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.outputs import TokenLogprobs
from fledge.engine.accepted import compact_accepted
from fledge.engine.cache import PagedCache
from fledge.engine.commits import Said, Yield, commit
from fledge.engine.drafter import Drafter
from fledge.engine.grammar_masks import PassMasks, begin_masks
from fledge.engine.scheduler import StepPlan
from fledge.engine.sequence import Sequence
from fledge.models.target import Target
from fledge.ops.accept import Walk
from fledge.ops.logit_rules import LogitRules, make_rules
from fledge.ops.logprobs import read_logprobs
from fledge.ops.paged import TreePass, make_tree_pass
from fledge.ops.sampling import SamplingBatch, make_sampling_batch
from fledge.ops.settle import deepest_offered
from fledge.ops.staging import send
from fledge.ops.tree import TreeBatch, root_only, with_roots


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the requests with logits choose their tokens; the same while the same requests run."""

    sequences: tuple[Sequence, ...]
    batch: SamplingBatch
    rules: LogitRules | None
    sampled_B: Tensor


class Verifier:
    """Runs the target for a batch of sequences and commits what it says."""

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        drafter: Drafter,
        walk: Callable[..., Walk],
    ) -> None:
        self._target = target
        self._walk = walk
        self._cache = cache
        self._drafter = drafter
        self._sampling: Sampling | None = None

    def run(self, plan: StepPlan, trees: TreeBatch | None) -> Yield:
        """One pass; `trees` are those of the drafting requests."""
        decoding = [*plan.drafting, *plan.plain]
        chunks = [*((seq, 1) for seq in decoding), *plan.finishing, *plan.reading]
        walkers = [seq for seq, _ in chunks[: len(decoding) + len(plan.finishing)]]
        num_decode_rows = len(decoding) + (trees.num_drafts if trees is not None else 0)
        packed = self._pack(chunks, len(decoding), trees)
        masks = begin_masks(walkers, trees)
        output = self._target.forward(
            packed,
            self._cache.target_memory,
            logit_rows_R=self._logit_rows(plan, num_decode_rows),
            taps=self._drafter.taps,
        )
        if output.features_TF is not None:
            self._drafter.remember(output.features_TF, packed)
        for seq, chunk in plan.reading:
            seq.kv_len += chunk
        if not walkers:
            return Yield(0)
        roots_B = send([seq.newest_token_id for seq in walkers], self._device)
        all_trees = root_only(roots_B) if trees is None else with_roots(trees, roots_B)
        rows_BN = packed.node_rows(all_trees.max_size)[: len(walkers)]
        # Rows of logits behind the decoding ones belong to the requests that finish reading.
        ends = num_decode_rows + torch.arange(len(plan.finishing), device=self._device)
        rows_BN[len(decoding) :] = ends[:, None]
        walk = self._choose(walkers, output.logits_RV, rows_BN, all_trees, masks)
        if trees is not None:
            drafted = slice(len(plan.drafting))
            compact_accepted(self._cache, packed, walk.nodes_BL[drafted], walk.lengths_B[drafted])
            self._observe(trees, walk, len(plan.drafting))
        is_copied_B = all_trees.is_copied_B
        copied_B = walk.failed_B & False if is_copied_B is None else is_copied_B
        facts = [walk.lengths_B, deepest_offered(all_trees, walk), walk.failed_B, copied_B]
        return self._commit(plan, walkers, walk, torch.stack([one.long() for one in facts]))

    @property
    def _device(self) -> torch.device:
        return self._target.device

    def _pack(
        self, chunks: list[tuple[Sequence, int]], num_decoding: int, trees: TreeBatch | None
    ) -> TreePass:
        tokens = [
            token
            for seq, chunk in chunks
            for token in seq.token_ids[seq.kv_len : seq.kv_len + chunk]
        ]
        if trees is not None:
            # Roots of requests without drafts are never read from the tree, but from their chains.
            trees = with_roots(
                trees, torch.zeros(len(chunks), dtype=torch.long, device=self._device)
            )
        return make_tree_pass(
            chain_tokens_C=send(tokens, self._device),
            chain_B=send([chunk for _, chunk in chunks], self._device),
            context_B=send([seq.kv_len for seq, _ in chunks], self._device),
            trees=trees,
            num_rows=len(tokens) + (trees.num_drafts if trees is not None else 0),
            tables=self._cache.tables([seq for seq, _ in chunks]),
            num_short=num_decoding,
            last_position=self._target.context_len - 1,
        )

    def _logit_rows(self, plan: StepPlan, num_decode_rows: int) -> Tensor | None:
        """Rows that choose a token: all decoding ones, and the last of each finished prompt."""
        if not plan.finishing and not plan.reading:
            return None
        rows = list(range(num_decode_rows))
        row = num_decode_rows
        for _, chunk in plan.finishing:
            row += chunk
            rows.append(row - 1)
        # Models take no empty list of rows; a row that nobody asks for does no harm.
        return send(rows or [0], self._device)

    def _choose(
        self,
        walkers: list[Sequence],
        logits_RV: Tensor,
        rows_BN: Tensor,
        trees: TreeBatch,
        masks: PassMasks | None,
    ) -> Walk:
        sampling = self._sampling_of(walkers)
        if masks is not None:
            trees = masks.apply(
                logits_RV, rows_BN, trees, keeps_raw=sampling.batch.asking_A is not None
            )
        positions_B = send([len(seq.output_ids) for seq in walkers], self._device)
        walk = self._walk(
            logits_RV,
            rows_BN,
            trees,
            sampling.batch,
            positions_B,
            sampling.rules,
            max_depth=trees.max_depth,
        )
        if masks is not None:
            walk = masks.with_raw_logprobs(walk, logits_RV, rows_BN, sampling.batch)
        return walk

    def _sampling_of(self, walkers: list[Sequence]) -> Sampling:
        known = self._sampling
        if known is not None and _are_same(known.sequences, walkers):
            return known
        params = [seq.request.params for seq in walkers]
        self._sampling = Sampling(
            sequences=tuple(walkers),
            batch=make_sampling_batch(params, self._device),
            rules=make_rules([seq.rules for seq in walkers]),
            sampled_B=torch.tensor([not one.is_greedy for one in params], device=self._device),
        )
        return self._sampling

    def forget_sampling(self) -> None:
        """Rows of counts have changed hands: the next pass looks them up again."""
        self._sampling = None

    def _observe(self, trees: TreeBatch, walk: Walk, num_drafting: int) -> None:
        assert self._sampling is not None
        drafted = Walk(
            tokens_BL=walk.tokens_BL[:num_drafting],
            nodes_BL=walk.nodes_BL[:num_drafting],
            lengths_B=walk.lengths_B[:num_drafting],
            failed_B=walk.failed_B[:num_drafting],
            logprobs=None,
        )
        self._drafter.observe(trees, drafted, self._sampling.sampled_B[:num_drafting])

    def _commit(
        self, plan: StepPlan, walkers: list[Sequence], walk: Walk, facts_4B: Tensor
    ) -> Yield:
        """The one place where the host waits for the device: it learns what was said."""
        lengths, offered, failed, copied = facts_4B.tolist()
        rows = walk.tokens_BL.tolist()
        tokens = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        params = [seq.request.params for seq in walkers]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(walkers)
        if walk.logprobs is not None:
            logprobs = read_logprobs(walk.logprobs, tokens, params)
        chunks = [1] * plan.num_decoding + [chunk for _, chunk in plan.finishing]
        said = [
            Said(
                sequence=seq,
                tokens=tokens[i],
                num_offered=offered[i],
                has_failed=bool(failed[i]),
                had_drafts=i < len(plan.drafting),
                is_copied=bool(copied[i]),
                num_read=chunks[i],
                was_decoding=i < plan.num_decoding,
                logprobs=logprobs[i],
            )
            for i, seq in enumerate(walkers)
        ]
        if any(failed):
            self.forget_sampling()
        return commit(said)


def _are_same(known: tuple[Sequence, ...], walkers: Many[Sequence]) -> bool:
    return len(known) == len(walkers) and all(a is b for a, b in zip(known, walkers, strict=True))
