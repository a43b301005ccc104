"""Passes of a target over chains of a few requests that ask for the token behind each row.

The same kernels as `NativeDecoder.forward`, with less around them: everything but the tokens and a
few lengths is laid out once, and logits are only written where a request is above temperature 0.
`Target.forward` and `sample` are the twin; a row's logits have the same bits there.

Legend: T rows, D hidden size, F tapped features, V vocabulary.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fledge.contracts.errors import CapacityError
from fledge.models.native_decoder import NativeDecoder, repeat_taps
from fledge.ops.kv import KVMemory
from fledge.ops.native_chains import ChainRows, TokenChain, address_of, whole_numbers
from fledge.ops.native_structs import CPass, CView
from fledge.ops.native_walk import NO_TOKEN, Draw, NativeWalk
from fledge.ops.paged import BlockTables


class ChainPasses:
    """Passes over one cache."""

    def __init__(
        self,
        native: NativeDecoder,
        embed: nn.Embedding,
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
        self.rows = ChainRows(max_requests=max_requests, max_rows=max_rows)
        size = native.hidden_size
        self._stream_TD = torch.empty(max_rows, size)
        self._final_TD = torch.empty(max_rows, size)
        self.features_XF = torch.empty(num_features + max_rows, size * len(self._taps))
        """What the taps leave: rows that were kept, then those of the last pass."""

        self._features_address = self.features_XF.data_ptr()
        self._bytes_of_features = self.features_XF.shape[1] * self.features_XF.element_size()
        # Some families scale embeddings, and some heads are told them: that is done here.
        self._looks_up_tokens = _is_table(embed) and 0 not in self._taps
        self._repeats_taps = len(set(self._taps)) < len(self._taps)
        self._tokens = whole_numbers(max_rows)
        self._walk = NativeWalk(native.library, self.rows)
        self._logits_TV = torch.empty(0, native.vocab_size)
        views = self.rows.views(tables, native.windows)
        self._c = CPass(
            self.rows.c,
            (CView * len(views))(*views),
            len(views),
            self.rows.tokens_address if self._looks_up_tokens else None,
            embed.weight.data_ptr() if self._looks_up_tokens else None,
            self._stream_TD.data_ptr(),
            None,
            self.features_XF.shape[1],
            self._final_TD.data_ptr(),
            None,
            0,
            None,
            address_of(self._tokens),
        )
        self.rows.moved_to(self._c.rows)
        self._decoder = native.layers_over(memory, self._stream_TD, self._taps)

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
        tokens = self._tokens[:num_rows].tolist()
        return [None if token == NO_TOKEN else token for token in tokens]

    def _room_for_logits(self, num_rows: int) -> Tensor:
        if self._logits_TV.shape[0] < num_rows:
            self._logits_TV = torch.empty(num_rows, self._native.vocab_size)
        return self._logits_TV[:num_rows]

    def _run_pass(self, num_rows: int, logits_TV: Tensor | None, features_at: int) -> None:
        c = self._c
        c.num_logit_rows = num_rows
        c.features = self._features_address + features_at * self._bytes_of_features
        c.logits = None if logits_TV is None else logits_TV.data_ptr()
        if not self._looks_up_tokens:
            self._embed_tokens(num_rows, features_at)
        failed = self._native.library.run_pass(
            ctypes.byref(self._decoder), ctypes.byref(c), torch.get_num_threads()
        )
        if failed:
            raise CapacityError(f"there is no memory left for a pass of {num_rows} tokens.")
        if self._repeats_taps:
            repeat_taps(self.features_XF[features_at : features_at + num_rows], self._taps)

    @torch.no_grad()
    def _embed_tokens(self, num_rows: int, features_at: int) -> None:
        stream_TD = self._stream_TD[:num_rows]
        stream_TD.copy_(self._embed(self.rows.tokens_T[:num_rows]))
        if 0 in self._taps:
            size = self._native.hidden_size
            place = self._taps.index(0) * size
            features_TF = self.features_XF[features_at : features_at + num_rows]
            features_TF[:, place : place + size] = stream_TD


def _is_table(embed: nn.Embedding) -> bool:
    """Whether embeddings are rows of a table and nothing else."""
    weight = embed.weight
    is_plain = type(embed) is nn.Embedding and embed.max_norm is None
    return is_plain and weight.dtype == torch.float32 and weight.is_contiguous()
