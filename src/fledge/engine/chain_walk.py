"""Which drafts of a chain the target keeps, where its own tokens behind the rows are known.

`ops/accept.py` is the same for trees and rules, on any device.
"""

from collections.abc import Sequence as Many

from fledge.engine.commits import Said
from fledge.engine.sequence import Sequence


def walk_chain(
    seq: Sequence, drafts: Many[int], own: list[int | None], *, is_copied: bool = False
) -> Said:
    """The target's own tokens, for as long as the drafts say the same."""
    tokens: list[int] = []
    has_failed = False
    for place, token in enumerate(own):
        if token is None:
            has_failed = True
            break
        tokens.append(token)
        if place >= len(drafts) or drafts[place] != token:
            break
    return Said(
        sequence=seq,
        tokens=tokens,
        num_offered=min(len(tokens), len(drafts)),
        has_failed=has_failed,
        had_drafts=bool(drafts),
        is_copied=is_copied,
    )
