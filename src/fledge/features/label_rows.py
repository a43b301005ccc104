"""What training needs of a sample, judged by its loss mask: the same online and from features.

    token      x0    x1    x2    x3    x4    x5        loss on x3 and x4: 5 tokens are kept
    feature    f0    f1    f2                          as far as the last label is reached from
    label row              r2    r3                    row 2 has the distribution of x3

A draft starts from a feature and the token after it, so that the first label is token 2. Behind the
last label nothing is read.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_LABEL = 2
"""Token of a sample."""


def kept_tokens(loss_mask: NDArray[Any]) -> int:
    """Tokens up to the last label; 0 where a sample teaches nothing."""
    labels = np.flatnonzero(loss_mask)
    last = int(labels[-1]) if len(labels) else 0
    return last + 1 if last >= FIRST_LABEL else 0


def read_tokens(num_kept: int) -> int:
    """Tokens that the target reads of them: the last is a label only."""
    return max(num_kept - 1, 0)


def feature_rows(num_kept: int) -> int:
    """Rows 0, 1, ... whose features are needed."""
    return max(num_kept - 2, 0)


def label_rows(loss_mask: NDArray[Any]) -> NDArray[np.int64]:
    """Rows whose distribution a draft is measured by: those before tokens with loss."""
    return np.flatnonzero(loss_mask[FIRST_LABEL:]) + 1
