"""Chains of drafts of a head on a CPU in one call of the native kernels.

Features of committed tokens are fused, the committed tokens that the head has not read are read,
and then it goes on from its own best token, step by step; above temperature 0 that is the best
under the noise that the target will add (`ops/noised_top.py`). `HeadDrafter.draft` with trees of
width 1 is the twin. Weights are those of `NativeHead`.

Legend: B requests, T rows, N rows of features, F their width.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fledge.models.native_head import NativeHead
from fledge.ops.kv import KVPool
from fledge.ops.native_chains import ChainRows, TokenChain
from fledge.ops.native_structs import CChain, CDecoder
from fledge.ops.native_walk import Draw, NativeDraws
from fledge.ops.noised_top import DROPPED, SCALE, num_candidates
from fledge.ops.paged import BlockTables

_T = TypeVar("_T")


class ChainDrafts(NamedTuple):
    """Drafts of some requests, level by level."""

    token_ids: list[list[int]]
    """[level][request]"""

    probabilities: list[list[float]]
    """What the head gives each of them, once those before it are right."""


class Rival(NamedTuple):
    """A chain from elsewhere that a request may go on with instead."""

    place: int
    """Of the request among the chains."""

    token_id: int
    """How it begins."""

    limit: float
    """The head's first draft has to be as probable as this, and another token, to be preferred."""

    def wins(self, drafts: ChainDrafts) -> bool:
        token_id, probability = drafts.token_ids[0], drafts.probabilities[0]
        return token_id[self.place] == self.token_id or probability[self.place] < self.limit


class NativeDrafts:
    """Drafts over one cache."""

    def __init__(
        self,
        head: NativeHead,
        memory: KVPool,
        tables: BlockTables,
        *,
        features_layer: int,
        max_requests: int,
        max_rows: int,
        max_features: int,
        max_depth: int,
    ) -> None:
        """`features_layer` is where fused features are in the head's memory."""
        self._head, self._memory = head, memory
        self._features_layer = features_layer
        self.rows = ChainRows(max_requests=max_requests, max_rows=max_rows)
        self._slots = np.zeros(max_features, dtype=np.int64)
        self._slots_address = self._slots.ctypes.data
        self._copied = np.zeros(max_requests, dtype=np.int64)
        self._limits = np.zeros(max_requests, dtype=np.float32)
        self._draws = NativeDraws(max_requests)
        self._tokens = np.zeros(max_requests * max_depth, dtype=np.int64)
        self._probabilities = np.zeros(max_requests * max_depth, dtype=np.float32)
        self._num_levels = np.zeros(1, dtype=np.int64)
        (self._view,) = self.rows.views(tables, [head.window])
        self._version: CDecoder | None = None
        self._c = CChain()

    def draft(
        self,
        chains: Sequence[TokenChain],
        features_NF: Tensor,
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

        Features are those of the slots given, which no call was given before; they are stored.
        """
        self.rows.write(chains)
        c, decoder = self._described(features_NF)
        num_features = len(feature_slots)
        self._slots[:num_features] = feature_slots
        features_NF = self._head.fusion_input(features_NF)
        c.rows = self.rows.c
        c.features, c.num_features = features_NF.data_ptr(), num_features
        c.feature_slots = self._slots_address
        c.depth, c.least = depth, least
        c.draws = None if draws is None else self._draws.address
        if draws is not None:
            self._draws.write(draws)
        self._copied[: len(chains)] = -1
        for rival in rivals:
            self._copied[rival.place], self._limits[rival.place] = rival.token_id, rival.limit
        failed = self._head.library.run_chain(
            ctypes.byref(decoder), ctypes.byref(c), torch.get_num_threads()
        )
        if failed:
            raise MemoryError(f"no memory for a head's step over {self.rows.c.num_rows} tokens")
        count, end = len(chains), int(self._num_levels[0]) * len(chains)
        return ChainDrafts(
            _by_level(self._tokens[:end].tolist(), count),
            _by_level(self._probabilities[:end].tolist(), count),
        )

    def _described(self, like: Tensor) -> tuple[CChain, CDecoder]:
        """The head's weights and memory, described anew when others were loaded."""
        decoder = self._head.layers_over(self._memory, like)
        if self._version is decoder:
            return self._c, decoder
        config, products = self._head.config, self._head.products
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
            fused=fused_SD.data_ptr(),
            to_logits=products.to_logits.c,
            unrounded=products.to_logits.rows_VD.data_ptr(),
            to_target=self._head.draft_to_target_V.data_ptr(),
            copied=self._copied.ctypes.data,
            limits=self._limits.ctypes.data,
            num_candidates=num_candidates(1, products.to_logits.c.num_rows),
            dropped=DROPPED,
            scale=SCALE,
            drafts=self._tokens.ctypes.data,
            probabilities=self._probabilities.ctypes.data,
            num_levels=self._num_levels.ctypes.data,
        )
        self._version = decoder
        return self._c, decoder


def _by_level(values: list[_T], count: int) -> list[list[_T]]:
    return [values[start : start + count] for start in range(0, len(values), count)]
