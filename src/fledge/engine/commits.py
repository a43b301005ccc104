"""What the target said becomes part of the requests; the same for every kind of cycle."""

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import TokenLogprobs
from fledge.engine.sequence import Sequence


@dataclass(slots=True)
class Said:
    """What one request's walk yielded, on the host."""

    sequence: Sequence
    tokens: list[int]
    """Accepted drafts, then one of the target's own."""

    num_offered: int
    """Depth of the deepest draft it was offered."""

    has_failed: bool
    """Logits that are no numbers: its tokens mean nothing."""

    had_drafts: bool
    had_nodes: bool = False
    """Whether nodes that are no drafts may have hung below it, to make a pass as large as planned.
    """

    is_copied: bool = False
    """Whether its drafts were copied from what it had said before."""

    num_read: int = 1
    """Committed tokens that it brought to the pass."""

    was_decoding: bool = True
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Yield:
    """What a pass yielded, on the host."""

    num_emitted: int
    """Tokens committed by requests that were decoding."""

    reached_at_depth: tuple[int, ...] = ()
    """Requests that were offered a draft at depth 1, 2, ... below what they accepted."""

    accepted_at_depth: tuple[int, ...] = ()
    num_copies_offered: int = 0
    """Drafts that were copied, down to the first that was refused."""

    num_copies_accepted: int = 0


def commit(said: Many[Said]) -> Yield:
    """Take what was said into the requests."""
    num_emitted, now = 0, time.perf_counter()
    num_copies_offered = num_copies_accepted = 0
    reached: list[int] = []
    went_on: list[int] = []
    for one in said:
        if one.had_drafts:
            accepted = len(one.tokens) - 1
            missing = one.num_offered - len(reached)
            if missing > 0:
                reached += [0] * missing
                went_on += [0] * missing
            for level in range(one.num_offered):
                reached[level] += 1
                went_on[level] += level < accepted
            if one.is_copied:
                num_copies_offered += one.num_offered
                num_copies_accepted += accepted
        seq = one.sequence
        if seq.error is not None:  # its grammar cannot be followed
            continue
        if one.has_failed:
            _fail(one)
            continue
        seq.is_suspect = False
        count = seq.commit(one.tokens, one.logprobs, now=now)
        # A chunk leaves its own entries; so do accepted drafts, the last token never does.
        seq.kv_len += one.num_read + count - 1
        if one.was_decoding:
            num_emitted += count
        if one.had_drafts:
            seq.record_drafts(one.num_offered, accepted, is_copied=one.is_copied)
    return Yield(
        num_emitted,
        reached_at_depth=tuple(reached),
        accepted_at_depth=tuple(went_on),
        num_copies_offered=num_copies_offered,
        num_copies_accepted=num_copies_accepted,
    )


def _fail(said: Said) -> None:
    """Logits that are no numbers: a draft's, which it shares with its root, or its own."""
    seq = said.sequence
    if said.had_drafts or said.had_nodes:
        # Masked entries count nothing unless they are no numbers: ask again without drafts. What
        # the walk has counted for penalties is counted anew.
        seq.is_suspect = True
        seq.rules.release()
        return
    seq.error = RequestError(
        f"the target's logits after token {seq.len} of this request are not numbers; its weights "
        "or its precision are at fault. Load it in bfloat16 or float32, or check its files."
    )
