"""Where an answer begins to go round in circles.

Small models repeat themselves, and a head guesses repetitions well: figures over them flatter it.
A *looping span* is a run of tokens each of which equals the one `period` places before it, for one
period of at most 64 tokens, and which goes on for at least two periods and at least 16 tokens: the
same words at least three times. The first time does not belong to the span.
"""

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64
MIN_RUN = 16


def find_loop(token_ids: Sequence[int]) -> int | None:
    """Place of the first token that belongs to a looping span; None where there is none."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    starts = []
    for period in range(1, min(MAX_PERIOD, len(tokens) // 3) + 1):
        start = _first_run(tokens[period:] == tokens[:-period], max(2 * period, MIN_RUN))
        if start is not None:
            starts.append(start + period)
    return min(starts, default=None)


def _first_run(is_equal: np.ndarray, length: int) -> int | None:
    """Where the first run of at least this many equal places begins."""
    breaks = np.flatnonzero(np.concatenate([[True], ~is_equal, [True]]))
    lengths = np.diff(breaks) - 1
    found = np.flatnonzero(lengths >= length)
    return int(breaks[found[0]]) if len(found) else None
