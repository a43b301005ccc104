"""Chains of drafts of a head on a CPU in one call of the native kernels.

Features of committed tokens are fused, the committed tokens that the head has not read are read,
and then it goes on from its own best token, step by step; above temperature 0 that is the best
under the noise that the target will add (`ops/noised_top.py`). `HeadDrafter.draft` with trees of
width 1 is the twin. Weights are those of `NativeHead`.

Legend: B requests, T rows, N rows of features, F their width.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.models.native_head import NativeHead, NativeProducts
from fledge.ops.kv import KVPool
from fledge.ops.native_chains import ChainRows, TokenChain, address_of, whole_numbers
from fledge.ops.native_structs import CChain
from fledge.ops.native_walk import Draw, NativeDraws
from fledge.ops.noised_top import DROPPED, SCALE, num_candidates
from fledge.ops.paged import BlockTables

_NOT_COPIED = -1


class ChainDrafts(NamedTuple):
    """Drafts of some requests, all equally many."""

    token_ids: list[list[int]]
    """[request][level]"""

    probabilities: list[list[float]]
    """What the head gives each of them, once those before it are right."""

    num_levels: int


class Rival(NamedTuple):
    """A chain from elsewhere that a request may go on with instead."""

    place: int
    """Of the request among the chains."""

    token_id: int
    """How it begins."""

    limit: float
    """The head's first draft has to be as probable as this, and another token, to be preferred."""

    def wins(self, drafts: ChainDrafts) -> bool:
        token_ids, probabilities = drafts.token_ids[self.place], drafts.probabilities[self.place]
        return token_ids[0] == self.token_id or probabilities[0] < self.limit


class NativeDrafts:
    """Drafts over one cache."""

    def __init__(
        self,
        head: NativeHead,
        memory: KVPool,
        tables: BlockTables,
        features_XF: Tensor,
        *,
        features_layer: int,
        max_requests: int,
        max_rows: int,
        max_depth: int,
    ) -> None:
        """`features_XF` is where tapped features are found, `features_layer` where fused ones go in
        the head's memory."""
        self._head, self._memory = head, memory
        self._features_XF, self._features_layer = features_XF, features_layer
        self.rows = ChainRows(max_requests=max_requests, max_rows=max_rows)
        self._slots, self._copied = whole_numbers(len(features_XF)), whole_numbers(max_requests)
        self._tokens, self._num_levels = whole_numbers(max_requests * max_depth), whole_numbers(1)
        self._limits = array("f", [0.0]) * max_requests
        self._probabilities = array("f", [0.0]) * (max_requests * max_depth)
        self._draws = NativeDraws(max_requests)
        (self._view,) = self.rows.views(tables, [head.window])
        self._products: NativeProducts | None = None
        self.refresh()

    def draft(
        self,
        chains: Sequence[TokenChain],
        feature_slots: Sequence[int],
        *,
        depth: int,
        least: float = 0.0,
        draws: Sequence[Draw] | None = None,
        rivals: Sequence[Rival] = (),
    ) -> ChainDrafts:
        """Drafts behind each chain, up to a depth, or until all are less probable than `least`.

        With `draws` they are guesses at what each request will draw there. A request whose rival
        wins has drafts behind its first that mean nothing, if any.

        The first features belong to the slots given, which no call was given before; fused, they
        are stored.
        """
        if self._head.products is not self._products:  # those from before are gone
            self.refresh()
        num_rows = self.rows.write(chains)
        c, num_features = self._c, len(feature_slots)
        for place, slot in enumerate(feature_slots):
            self._slots[place] = slot
        features_NF = None
        if self._head.norms_features:
            features_NF = self._head.fusion_input(self._features_XF[:num_features])
            c.features = features_NF.data_ptr()
        c.num_features, c.depth, c.least = num_features, depth, least
        c.draws = None if draws is None else self._draws.address
        if draws is not None:
            self._draws.write(draws)
        for place in range(len(chains)):
            self._copied[place] = _NOT_COPIED
        for rival in rivals:
            self._copied[rival.place], self._limits[rival.place] = rival.token_id, rival.limit
        failed = self._head.library.run_chain(
            ctypes.byref(self._decoder), ctypes.byref(c), torch.get_num_threads()
        )
        if failed:
            raise MemoryError(f"no memory for a head's step over {num_rows} tokens")
        num_levels, starts = self._num_levels[0], range(0, len(chains) * depth, depth)
        return ChainDrafts(
            [self._tokens[start : start + num_levels].tolist() for start in starts],
            [self._probabilities[start : start + num_levels].tolist() for start in starts],
            num_levels,
        )

    def refresh(self) -> None:
        """Describe the head's weights and memory anew when other weights were loaded."""
        self._head.refresh()
        if self._head.products is self._products:
            return
        config, products, like = self._head.config, self._head.products, self._features_XF
        self._decoder = self._head.layers_over(self._memory, like)
        (fused_SD,) = self._memory.hold(self._features_layer, like, (config.hidden_size,))
        embedding_norm, hidden_norm = self._head.input_norms
        self._c = CChain(
            rows=self.rows.c,
            view=self._view,
            tokens=self.rows.tokens_address,
            embedding=self._head.embedding.data_ptr(),
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            keeps_normed=int(config.norm_before_residual),
            feeds_normed=int(config.norm_output),
            fuse=products.to_hidden.c,
            features=like.data_ptr(),
            feature_slots=address_of(self._slots),
            fused=fused_SD.data_ptr(),
            to_logits=products.to_logits.c,
            unrounded=products.to_logits.rows_VD.data_ptr(),
            to_target=self._head.draft_to_target_V.data_ptr(),
            copied=address_of(self._copied),
            limits=address_of(self._limits),
            num_candidates=num_candidates(1, products.to_logits.c.num_rows),
            dropped=DROPPED,
            scale=SCALE,
            drafts=address_of(self._tokens),
            probabilities=address_of(self._probabilities),
            num_levels=address_of(self._num_levels),
        )
        self.rows.moved_to(self._c.rows)
        self._products = products
