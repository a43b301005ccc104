"""The target's own tokens down chains of drafts, chosen by the native kernels on a CPU.

`sample` is the twin: temperature, filters and noise are its, and so is every token. What the
kernels cannot tell apart from a tie it is asked for.

Legend: T rows, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.native_chains import ChainRows, TokenChain
from fledge.ops.native_library import NativeLibrary
from fledge.ops.native_structs import CWalk
from fledge.ops.sampling import make_sampling_batch, sample

NO_TOKEN, _UNSURE = -1, -2
_DRAW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("position", np.int64),
    ]
)


_CHECKED = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.7),
)


class Draw(NamedTuple):
    """How a request chooses its next token."""

    params: SamplingParams
    position: int
    """Tokens that it has said."""


class NativeDraws:
    """Draws of some requests, at the same place in memory every time."""

    def __init__(self, max_requests: int) -> None:
        self._rows = np.zeros(max_requests, dtype=_DRAW)
        self.address = int(self._rows.ctypes.data)

    def write(self, draws: Sequence[Draw]) -> None:
        self._rows[: len(draws)] = [
            (one.temperature, one.top_p, one.min_p, one.top_k, one.seed, position)
            for one, position in draws
        ]


class NativeWalk:
    """Walks down the chains that a pass was about."""

    def __init__(self, library: NativeLibrary, rows: ChainRows) -> None:
        self._library, self._rows = library, rows
        self._draws = NativeDraws(rows.max_requests)
        self._said = np.zeros(rows.max_rows, dtype=np.int64)

    def run(
        self, logits_TV: Tensor, chains: Sequence[TokenChain], draws: Sequence[Draw]
    ) -> list[int | None]:
        """The token behind each row, chain by chain, down to the first draft that differs.

        None where logits are no numbers. Rows behind have some token.
        """
        self._draws.write(draws)
        c = self._rows.c
        walk = CWalk(
            logits_TV.data_ptr(),
            logits_TV.shape[1],
            c.num_requests,
            c.starts,
            c.counts,
            self._rows.tokens_address,
            self._draws.address,
            self._said.ctypes.data,
        )
        failed = self._library.run_walk(ctypes.byref(walk), torch.get_num_threads())
        if failed:
            raise MemoryError(f"no memory to choose tokens of {c.num_requests} requests")
        said: list[int | None] = self._said[: c.num_rows].tolist()
        start = 0
        for chain, draw in zip(chains, draws, strict=True):
            stop = start + len(chain.token_ids)
            said[start:stop] = _settled(said[start:stop], logits_TV[start:stop], chain, draw)
            start = stop
        return said


def check_walks(library: NativeLibrary) -> bool:
    """Whether tokens down a chain are those of `sample`, with filters of all kinds and without."""
    logits_TV = 4.0 * torch.randn(8, 1003, generator=torch.Generator().manual_seed(0))
    rows = ChainRows(max_requests=1, max_rows=len(logits_TV))
    walk = NativeWalk(library, rows)
    for seed, one in enumerate(_CHECKED):
        params = replace(one, seed=seed)
        wanted = [_ask_twin(logits_V, params, place) for place, logits_V in enumerate(logits_TV)]
        # All drafts but the last are right, so that the walk goes down to the end.
        chain = TokenChain(0, 0, [0, *(token or 0 for token in wanted[:-1])])
        rows.write([chain])
        if walk.run(logits_TV, [chain], [Draw(params, 0)]) != wanted:
            return False
    return True


def _settled(
    said: list[int | None], logits_TV: Tensor, chain: TokenChain, draw: Draw
) -> list[int | None]:
    """What was said down one chain, with the twin's tokens where the kernels were unsure."""
    is_unsure = False
    for row, token in enumerate(said):
        is_unsure |= token == _UNSURE
        if is_unsure:
            said[row] = _ask_twin(logits_TV[row], draw.params, draw.position + row)
        elif token == NO_TOKEN:
            said[row] = None
        if row + 1 == len(said) or said[row] != chain.token_ids[row + 1]:
            break
    return said


def _ask_twin(logits_V: Tensor, params: SamplingParams, position: int) -> int | None:
    if not logits_V.amax().isfinite():
        return None
    batch = make_sampling_batch([params], logits_V.device)
    return int(sample(logits_V[None], batch, torch.tensor([position])))
