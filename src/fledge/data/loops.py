"""Where an answer begins to go round in circles.

Small models repeat themselves, and a head guesses repetitions well: figures over them flatter it.
A *looping span* is a run of tokens each of which equals the one `period` places before it, for one
period of at most 64 tokens, and which goes on for at least two periods and at least 16 tokens: the
same words at least three times. The first time does not belong to the span.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

MAX_PERIOD = 64
MIN_RUN = 16
"""A power of two, by which runs are found."""


def find_loop(token_ids: Sequence[int]) -> int | None:
    """Place of the first token that belongs to a looping span; None where there is none."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    starts = []
    for period in _likely_periods(tokens):
        start = _first_run(tokens[period:] == tokens[:-period], max(2 * period, MIN_RUN))
        if start is not None:
            starts.append(start + period)
    return min(starts, default=None)


def _likely_periods(tokens: np.ndarray) -> list[int]:
    """Periods with a run that is long enough for the shortest: mostly none."""
    most = min(MAX_PERIOD, len(tokens) // 3)
    if len(tokens) <= MIN_RUN or not most:
        return []
    padding = np.full(most, tokens.min() - 1)
    later_NP = sliding_window_view(np.concatenate([tokens, padding]), most + 1)[:, 1:]
    is_run_NP = later_NP == tokens[:, None]
    length = 1
    while length < MIN_RUN:  # runs of twice the length: two that follow each other
        is_run_NP = is_run_NP[:-length] & is_run_NP[length:]
        length *= 2
    return [int(place) + 1 for place in np.flatnonzero(is_run_NP.any(axis=0))]


def _first_run(is_equal: np.ndarray, length: int) -> int | None:
    """Where the first run of at least this many equal places begins."""
    breaks = np.flatnonzero(np.concatenate([[True], ~is_equal, [True]]))
    lengths = np.diff(breaks) - 1
    found = np.flatnonzero(lengths >= length)
    return int(breaks[found[0]]) if len(found) else None
