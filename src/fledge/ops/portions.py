"""Rows of a wide matrix in portions: few at a time on a CPU, all at once elsewhere.

Sampling makes many temporary copies as wide as the vocabulary. A CPU is two to three times faster
while they fit its cache, and it may look which rows are still wanted; a GPU would have to be waited
for. Rows do not depend on each other, so portions change nothing but the time.

Legend: S chosen rows of B, I of them in a portion.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CPU_ELEMENTS = 2**17


def portions(rows_S: Tensor, num_columns: int, wanted_B: Tensor | None = None) -> Sequence[Tensor]:
    """Indices into `rows`, portion by portion; rows that are not wanted may be left out."""
    index_S = torch.arange(rows_S.shape[0], device=rows_S.device)
    if rows_S.device.type != "cpu":
        return [index_S]
    if wanted_B is not None:
        index_S = index_S[wanted_B[rows_S]]
    size = max(1, _CPU_ELEMENTS // num_columns)
    return [index_S[start : start + size] for start in range(0, index_S.shape[0], size)]
