"""Measures where each channel of the tapped layers lies, on a few thousand tokens of a corpus.

Robust figures, since the first tokens of a text have single values thousands of times larger than
any other: the median, and the range from the lowest tenth to the highest in units of a Gaussian.

Legend: T rows, N values of a row.
"""

from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.features.label_rows import read_tokens
from fledge.features.sample_rows import SampleRows
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.store.channels import Channels
from fledge.store.corpus import Corpus

MAX_ROWS = 4096
"""More would not change the figures by more than 3%."""

_TAIL = 0.1
_COLUMNS_AT_ONCE = 1024


def measure_channels(
    corpus: Corpus, rows: SampleRows, target: Target, taps: tuple[int, ...], *, max_tokens: int
) -> Channels:
    """Have the target read samples from all over the corpus, at most one pass of them."""
    numbers = spread_out(rows, min(max_tokens, MAX_ROWS))
    ids = [corpus[n].token_ids[: read_tokens(int(rows.kept[n]))] for n in numbers]
    token_ids_T = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(target.device)
    documents = make_documents([len(part) for part in ids], target.device)
    return channels_of(target.read(token_ids_T, documents, taps).features_TF)


def spread_out(rows: SampleRows, max_tokens: int) -> list[int]:
    """Numbers of samples, evenly from the whole corpus, ascending; at least one."""
    used = rows.used
    mean_len = max(1.0, rows.num_tokens / len(used))
    wanted = min(len(used), max(1, round(max_tokens / mean_len)))
    chosen: list[int] = []
    num_tokens = 0
    for place in np.linspace(0, len(used) - 1, wanted).round().astype(np.int64).tolist():
        num_tokens += read_tokens(int(rows.kept[used[place]]))
        if chosen and num_tokens > max_tokens:
            break
        chosen.append(int(used[place]))
    return chosen


@torch.no_grad()
def channels_of(rows_TN: Tensor) -> Channels:
    """Center and spread of each column."""
    used_TN = rows_TN[rows_TN.isfinite().all(dim=1)]
    if not len(used_TN):
        # The pass over the first sample will refuse it and say which it is.
        used_TN = torch.zeros_like(rows_TN[:1])
    step = -(-len(used_TN) // MAX_ROWS)
    found = [_measure(part) for part in torch.split(used_TN[::step], _COLUMNS_AT_ONCE, dim=1)]
    center, spread = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Channels(center, spread)


def _measure(columns_TN: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    sorted_TN = columns_TN.float().sort(dim=0).values
    last = len(sorted_TN) - 1
    tail = round(last * _TAIL)
    lowest_N, low_N, middle_N, high_N, highest_N = (
        sorted_TN[row] for row in (0, tail, last // 2, last - tail, last)
    )
    spread_N = (high_N - low_N) / (2 * NormalDist().inv_cdf(1 - _TAIL))
    # A channel that hardly ever moves counts by its whole range, one that never does as 1.
    range_N = highest_N - lowest_N
    spread_N = torch.where(spread_N > 0, spread_N, torch.where(range_N > 0, range_N, 1.0))
    return middle_N.cpu().numpy(), spread_N.cpu().numpy()
