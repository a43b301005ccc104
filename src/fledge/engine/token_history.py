"""Where the newest tokens of a text stood before, and what followed there.

The longest match counts, of equal ones the latest. A match may reach into what it is matched with:
a text that goes in circles goes on in them.

    number   0 1 2 3 4 5 6 7        newest tokens  a b c
    tokens   a b c d e a b c        match of 3 that ends at 2: d e a b c d ... is copied
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fledge.ops.copies import LEAST_MATCH, MOST_MATCH

_FIRST_ROOM = 512


class Copy(NamedTuple):
    """What followed where the newest tokens stood before."""

    match_len: int
    """Tokens that are the same in both places, as far as they were compared."""

    token_ids: list[int]


class TokenHistory:
    """Tokens of one request, kept where they can be compared quickly."""

    def __init__(self) -> None:
        self._tokens = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._count = 0
        self._known: set[int] = set()
        """Hashes of all runs of LEAST_MATCH tokens but the newest one: mostly it is not among
        them, and nothing has to be searched."""

        self._newest: int | None = None

    def find(self, token_ids: Sequence[int], count: int) -> Copy | None:
        """So many tokens to go on with; None where too few of the newest stood together before.

        `token_ids` are those of the last call, and what came since.
        """
        self._take(token_ids)
        if self._newest not in self._known:
            return None
        last, tokens = self._count - 1, self._tokens
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        match_len = 1
        while ends.size and match_len < MOST_MATCH:
            reaching = ends[ends >= match_len]
            longer = reaching[tokens[reaching - match_len] == tokens[last - match_len]]
            if not longer.size:
                break
            ends, match_len = longer, match_len + 1
        if match_len < LEAST_MATCH:
            return None
        start = int(ends[-1]) + 1
        places = start + np.arange(count) % (self._count - start)
        return Copy(match_len, tokens[places].tolist())

    def _take(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        if count > len(self._tokens):
            grown = np.zeros(max(count, 2 * len(self._tokens)), dtype=np.int64)
            grown[: self._count] = self._tokens[: self._count]
            self._tokens = grown
        tokens = self._tokens
        for place in range(self._count, count):  # mostly a few
            tokens[place] = token_ids[place]
        for end in range(max(self._count, LEAST_MATCH - 1) + 1, count + 1):
            if self._newest is not None:
                self._known.add(self._newest)
            self._newest = hash(tuple(token_ids[end - LEAST_MATCH : end]))
        self._count = count
