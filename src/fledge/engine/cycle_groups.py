"""Plain cycles of many requests are read several at a time.

What the host does for a request after a cycle is the same whether it said one token or four. Where
hundreds of requests decode, doing it after every cycle takes longer than the cycle.
"""

from collections.abc import Sequence as Many
from dataclasses import replace

from fledge.engine.commits import Said
from fledge.engine.steady_flight import Collected, Member

CYCLES_TOGETHER = 4
MANY_REQUESTS = 64
"""Fewer are read after every cycle: their tokens come one by one then."""


def merge(cycles: Many[Collected]) -> dict[Member, Said]:
    """What each request said in plain cycles that follow each other."""
    merged: dict[Member, Said] = {}
    for cycle in cycles:
        for member, one in cycle.said.items():
            before = merged.get(member)
            if before is None:
                merged[member] = one
            else:
                before.tokens.extend(one.tokens)
                before.num_cycles += 1
    return merged


def has_failures(cycles: Many[Collected]) -> bool:
    return any(one.has_failed for cycle in cycles for one in cycle.said.values())


def still_here(cycle: Collected) -> Collected:
    """Without those who ended, or lost their memory, by what was read before."""
    kept = {
        member: one for member, one in cycle.said.items() if not (member.has_left or member.is_gone)
    }
    return replace(cycle, said=kept)
