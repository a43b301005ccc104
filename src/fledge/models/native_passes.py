"""Passes of a target over chains of a few requests that ask for the token behind each row.

The same kernels as `NativeDecoder.forward`, with less around them: everything but the tokens and a
few lengths is laid out once, and logits are only written where a request is above temperature 0.
`Target.forward` and `sample` are the twin; a row's logits have the same bits there.

Legend: T rows, D hidden size, F tapped features, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fledge.contracts.errors import CapacityError
from fledge.models.native_decoder import NativeDecoder, repeat_taps
from fledge.ops.kv import KVMemory
from fledge.ops.native_chains import ChainRows, TokenChain
from fledge.ops.native_structs import CPass, CView
from fledge.ops.native_walk import Draw, NativeWalk
from fledge.ops.paged import BlockTables


class ChainPasses:
    """Passes over one cache."""

    def __init__(
        self,
        native: NativeDecoder,
        embed: Callable[[Tensor], Tensor],
        memory: KVMemory,
        tables: BlockTables,
        taps: Sequence[int],
        *,
        max_requests: int,
        max_rows: int,
        num_features: int,
    ) -> None:
        """`num_features` rows of features are kept beside those of a pass."""
        self._native, self._embed, self._taps = native, embed, tuple(taps)
        self._memory = memory
        self.rows = ChainRows(max_requests=max_requests, max_rows=max_rows)
        size = native.hidden_size
        self._final_TD = torch.empty(max_rows, size)
        self.features_XF = torch.empty(num_features + max_rows, size * len(self._taps))
        """What the taps leave: rows that were kept, then those of the last pass."""

        self._tokens = np.zeros(max_rows, dtype=np.int64)
        self._logits = np.zeros(max_rows, dtype=np.float32)
        self._walk = NativeWalk(native.library, self.rows)
        self._logits_TV = torch.empty(0, native.vocab_size)
        views = self.rows.views(tables, native.windows)
        self._c = CPass(
            self.rows.c,
            (CView * len(views))(*views),
            len(views),
            None,
            None,
            self.features_XF.shape[1],
            self._final_TD.data_ptr(),
            None,
            0,
            None,
            self._tokens.ctypes.data,
            self._logits.ctypes.data,
        )

    def run(
        self,
        chains: Sequence[TokenChain],
        draws: Sequence[Draw] | None = None,
        *,
        features_at: int = 0,
    ) -> list[int | None]:
        """The token behind each row, chain by chain; None where logits are no numbers.

        The best one of each, or with `draws` what each request draws, down to its first draft that
        differs. Features of the rows are left from row `features_at` on.
        """
        num_rows = self.rows.write(chains)
        logits_TV = None if draws is None else self._room_for_logits(num_rows)
        self._run_pass(num_rows, logits_TV, features_at)
        if draws is not None and logits_TV is not None:
            return self._walk.run(logits_TV, chains, draws)
        tokens: list[int | None] = self._tokens[:num_rows].tolist()
        is_good = np.isfinite(self._logits[:num_rows])
        if is_good.all():
            return tokens
        return [token if good else None for token, good in zip(tokens, is_good, strict=True)]

    def _room_for_logits(self, num_rows: int) -> Tensor:
        if self._logits_TV.shape[0] < num_rows:
            self._logits_TV = torch.empty(num_rows, self._native.vocab_size)
        return self._logits_TV[:num_rows]

    def _run_pass(self, num_rows: int, logits_TV: Tensor | None, features_at: int) -> None:
        stream_TD = self._embed(self.rows.tokens_T[:num_rows])
        c = self._c
        c.rows = self.rows.c
        c.stream, c.num_logit_rows = stream_TD.data_ptr(), num_rows
        c.logits = None if logits_TV is None else logits_TV.data_ptr()
        if self._taps:
            features_TF = self.features_XF[features_at : features_at + num_rows]
            c.features = features_TF.data_ptr()
            if 0 in self._taps:
                place = self._taps.index(0) * stream_TD.shape[1]
                features_TF[:, place : place + stream_TD.shape[1]] = stream_TD
        decoder = self._native.layers_over(self._memory, stream_TD, self._taps)
        failed = self._native.library.run_pass(
            ctypes.byref(decoder), ctypes.byref(c), torch.get_num_threads()
        )
        if failed:
            raise CapacityError(f"there is no memory left for a pass of {num_rows} tokens.")
        repeat_taps(self.features_XF[features_at : features_at + num_rows], self._taps)
