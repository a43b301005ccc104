"""Draft trees from an EAGLE-3 head.

It keeps the fused feature of every token the target has read, in the same paged memory as its own
keys and values, and reads the committed tokens it has not seen when it is next asked to draft:
after plain decoding that is one long chunk.

Legend: B requests, T rows of a pass, W tree width, D hidden size, V draft vocabulary, L tokens a
request may say in one cycle.
"""

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.calibration import Calibration
from fledge.engine.copied_drafts import CopiedDrafts, Copier
from fledge.engine.draft_gains import expected_gains
from fledge.engine.draft_passes import Scratch, share_rows, steady_reading, unread_pass
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.head_children import HeadChildren, Modes, draws_of
from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import SteadyBatch
from fledge.engine.tree_levels import TreeLevels, come_last, have_no_drafts
from fledge.models.attention import attend_packed
from fledge.models.fast_head import FastHead, HeadStep, has_fast_steps
from fledge.models.head import Eagle3Head, HeadOutput
from fledge.models.head_entries import head_entries
from fledge.models.target import Target
from fledge.ops.accept import Walk
from fledge.ops.attention import AttentionSpec
from fledge.ops.copies import Text
from fledge.ops.paged import BlockTables, Pass, TreePass
from fledge.ops.staging import send
from fledge.ops.tree import Candidates, TreeBatch, select_trees

_ENTRIES, FEATURES = 0, 1
"""Rows of the head's memory: its keys and values, and the fused features it reads, which may have
their tokens beside them."""


class Draft(NamedTuple):
    """Trees, and everything they were chosen from."""

    trees: TreeBatch
    candidates: Candidates


class HeadDrafter:
    """Draft trees from an EAGLE-3 head."""

    num_extended = 0
    """Committed tokens read in the last `draft`."""

    gains: Tensor | None = None
    """Expected gains of the last candidates, when the plan asked for them."""

    def __init__(
        self, head: Eagle3Head, target: Target, settings: EngineSettings, *, has_noise: bool = False
    ) -> None:
        """`has_noise` drafts with the noise that the target's tokens are chosen with."""
        self.head, self.has_noise = head, has_noise
        self._embedding = target.embedding.weight
        self._width = min(settings.tree.width, head.config.draft_vocab_size)
        self._budget = settings.tree.budget
        self._max_rows = settings.max_pass_tokens
        self.window = head.config.sliding_window
        self._attention = AttentionSpec(scale=head.config.head_dim**-0.5, window=self.window)
        self.taps = head.config.resolve_taps(target.num_layers)
        self.num_scratch = settings.tree.num_scratch
        config, size = head.config, self._embedding.element_size()
        self.bytes_per_slot = size * (
            2 * config.num_kv_heads * config.head_dim + config.hidden_size
        )
        self.weight_bytes = sum(p.numel() * p.element_size() for p in head.parameters())
        self.calibration = Calibration(settings.tree.depth, self._embedding.device)
        self._children = HeadChildren(head, self.calibration)
        self._copies = CopiedDrafts(self.calibration, settings, self._embedding.device)
        if self._copies.keeps_tokens:
            self.bytes_per_slot += torch.long.itemsize
        self.fast: FastHead | None = None
        if has_fast_steps(head):
            self.fast = FastHead(
                head,
                self._embedding,
                self._attention,
                # A reading and a tree may go past the end of the context, which nobody sees.
                num_positions=target.context_len + settings.tree.depth + 2,
                layer=_ENTRIES,
            )

    def attach(self, cache: PagedCache) -> None:
        self._cache = cache

    @torch.no_grad()
    def remember(self, features_TF: Tensor, packed: TreePass) -> None:
        rows = [self.head.fuse(features_TF)]
        if self._copies.keeps_tokens:
            rows.append(packed.token_ids_T[:, None])
        self._cache.head_memory.write(FEATURES, packed.view(self.window).write_slots_T, *rows)

    @torch.no_grad()
    def catch_up(self, sequences: Many[Sequence]) -> None:
        self._read_older(sequences)

    @torch.no_grad()
    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        self.num_extended, self.gains = 0, None
        self._read_older(sequences)
        tables = self._cache.tables(sequences)
        output = self._extend(sequences, [seq.len for seq in sequences], tables)
        lines = [
            [seq.len for seq in sequences],
            [not seq.request.params.is_greedy for seq in sequences],
            [seq.newest_token_id for seq in sequences],
        ]
        lens_B, sampled_B, roots_B = send(lines, self._embedding.device)
        width = min(plan.width, self._width)
        draws = draws_of(sequences, self._embedding.device) if self.has_noise else None
        modes = Modes(sampled_B.bool(), draws)
        copier = self._copies.of_host(sequences, modes.sampled_B, depth=plan.depth, width=width)
        draft = self._grow(output, lens_B, modes, roots_B, tables, plan, copier)
        if plan.is_measured:
            self.gains = self.gains_of(draft, plan).cpu()
        return draft.trees

    @torch.no_grad()
    def draft_steadily(
        self, batch: SteadyBatch, tables: BlockTables, plan: DraftPlan, *, has_noise: bool
    ) -> Draft:
        """The same for requests of which only the device knows where they stand.

        Each reads as many tokens as it may have said. Those behind its newest leave entries where
        drafts go, which are overwritten before anybody looks. `has_noise` where some of them may be
        above temperature 0, and noise is drafted with.
        """
        packed, before_T = steady_reading(batch, tables, self.window)
        last_B = packed.starts_B + batch.fresh_B - 1
        newest = self._read(packed, before_T, last_B)
        lens_B, roots_B, is_drafted_B = batch.lens_B, batch.newest_B, batch.is_drafted_B
        sampled_B = ~batch.is_greedy_B
        modes = Modes(sampled_B, batch.draws(sampled_B) if has_noise else None)
        copier, width = None, min(plan.width, self._width)
        if self._copies.keeps_tokens:
            _, tokens_S1 = self._cache.head_memory.layer(FEATURES)
            text = Text(tokens_S1, tables, self.window, lens_B, roots_B)
            copier = self._copies.of_device(text, sampled_B, is_drafted_B, width=width)
        return self._grow(newest, lens_B, modes, roots_B, tables, plan, copier, is_drafted_B)

    @torch.no_grad()
    def read_steadily(self, batch: SteadyBatch, tables: BlockTables) -> None:
        """Only read what `draft_steadily` would read."""
        packed, _ = steady_reading(batch, tables, self.window)
        self.store_entries(packed)

    def gains_of(self, draft: Draft, plan: DraftPlan) -> Tensor:
        """What drafting less would have yielded, on the device."""
        width = min(plan.width, self._width)
        return expected_gains(draft.candidates, depth=plan.depth, width=width)

    def _grow(
        self,
        output: HeadOutput,
        lens_B: Tensor,
        modes: Modes,
        roots_B: Tensor,
        tables: BlockTables,
        plan: DraftPlan,
        copier: Copier | None,
        is_drafted_B: Tensor | None = None,
    ) -> Draft:
        """Trees below the newest tokens, level by level; some requests may be given none."""
        width = min(plan.width, self._width)
        scratch = Scratch(lens_B, tables, self.window, width=width, depth=plan.depth)
        rotations = None
        if self.fast is not None:
            rotations = self.fast.rotation(scratch.positions_ET)
        levels = TreeLevels()
        levels.add(self._children.below(output.normed_TD, width, 1, modes))
        for level in range(1, plan.depth):
            output = self._run(
                scratch.level_pass(levels.frontier, level),
                output.feedback_TD,
                levels.frontier.rows_T,
                rotation_TD=None if rotations is None else rotations[level - 1],
            )
            levels.add(self._children.below(output.normed_TD, width, level + 1, modes))
        candidates, is_copied_B = levels.candidates(), None
        if copier is not None:
            candidates, is_copied_B = copier(candidates)
        if is_drafted_B is not None:
            candidates = come_last(candidates, is_drafted_B)
        trees = select_trees(
            roots_B,
            candidates,
            num_nodes=plan.nodes,
            max_nodes=self._budget,
            is_chain=width == 1,
        )
        if is_drafted_B is not None:
            trees = have_no_drafts(trees, is_drafted_B)
        trees = replace(trees, max_depth=plan.depth, is_copied_B=is_copied_B)
        return Draft(trees, candidates)

    def observe(self, trees: TreeBatch, walk: Walk, sampled_B: Tensor) -> None:
        self.calibration.observe(trees, walk, sampled_B)

    def _read_older(self, sequences: Many[Sequence]) -> None:
        """Make all entries but that of the newest token, whose output starts the next tree."""
        for seq in sequences:
            if self.window is not None and seq.kv_len - self.window + 1 > seq.head_len:
                # Entries that the window will never look at again need not be made.
                seq.head_len = seq.head_first = seq.kv_len - self.window + 1
        # Entry j needs feature j - 1, and a slot: the token behind a chunk may have none yet.
        stops = {seq: min(seq.kv_len, seq.len - 1) for seq in sequences}
        behind = [seq for seq in sequences if seq.head_len < stops[seq]]
        while behind:
            batch, new_lens = share_rows(behind, stops, self._max_rows)
            self.store_entries(self._pack(batch, new_lens, self._cache.tables(batch)))
            behind = [seq for seq in behind if seq.head_len < stops[seq]]

    def _extend(
        self, sequences: Many[Sequence], new_lens: list[int], tables: BlockTables
    ) -> HeadOutput:
        """Make the entries up to the given lengths; returns the output at the last of each."""
        packed = self._pack(sequences, new_lens, tables)
        before_T = packed.tables.slots(self.window, packed.request_T, packed.numbers_T - 1)
        last_B = packed.starts_B + packed.num_rows_B - 1
        return self._read(packed, before_T, last_B)

    def _pack(
        self, sequences: Many[Sequence], new_lens: list[int], tables: BlockTables
    ) -> TreePass:
        """The pass in which the head reads up to the given lengths."""
        packed = unread_pass(
            sequences, new_lens, [self.first_key(seq) for seq in sequences], tables
        )
        for seq, new in zip(sequences, new_lens, strict=True):
            seq.head_len = new
        self.num_extended += packed.num_tokens
        return packed

    @torch.no_grad()
    def store_entries(self, packed: TreePass) -> None:
        """Make the entries of all rows of a pass over committed tokens: nobody drafts from them."""
        # Token 0 has no feature before it, and an entry that nobody looks at.
        before_T = (packed.numbers_T - 1).clamp(min=0)
        numbers_2T = torch.stack([packed.numbers_T, before_T])
        slots_T, before_T = packed.tables.slots(self.window, packed.request_T, numbers_2T)
        memory = self._cache.head_memory
        features_SD = memory.layer(FEATURES)[0]
        embeds_TD = self.head.embed(packed.token_ids_T, self._embedding)
        hidden_TD = features_SD.index_select(0, before_T)
        entries = head_entries(self.head, embeds_TD, hidden_TD, packed.positions_T)
        memory.write(_ENTRIES, slots_T, *entries)

    def _read(self, packed: TreePass, before_T: Tensor, last_B: Tensor) -> HeadOutput:
        """Run the head on committed tokens and the features before them; output of some rows."""
        features_SD = self._cache.head_memory.layer(FEATURES)[0]
        return self._run(packed, features_SD, before_T, output_rows_R=last_B)

    def first_key(self, seq: Sequence) -> int:
        """The oldest entry that is worth looking at.

        Older ones may be gone. Rows that would see them only leave their own entries, which do not
        depend on what they see; the newest row sees nothing older than this.
        """
        return 1 if self.window is None else max(1, seq.kv_len - self.window + 1)

    def _run(
        self,
        packed: Pass,
        hidden_XD: Tensor,
        rows_T: Tensor,
        *,
        output_rows_R: Tensor | None = None,
        rotation_TD: Tensor | None = None,
    ) -> HeadOutput:
        """Run the head; `rows_T` picks the hidden state before each token."""
        memory = self._cache.head_memory
        if self.fast is not None:
            if rotation_TD is None:
                rotation_TD = self.fast.rotation(packed.positions_T)
            step = HeadStep(packed, hidden_XD, rows_T, rotation_TD, output_rows_R)
            return self.fast.run(step, memory)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend_packed(packed, memory, _ENTRIES, query, keys, values, self._attention)

        embeds_TD = self.head.embed(packed.token_ids_T, self._embedding)
        hidden_TD = hidden_XD.index_select(0, rows_T)
        output: HeadOutput = self.head(embeds_TD, hidden_TD, packed.positions_T, attend)
        if output_rows_R is None:
            return output
        return HeadOutput(output.feedback_TD[output_rows_R], output.normed_TD[output_rows_R])
