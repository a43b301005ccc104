"""Figures beside an answer: usage as OpenAI counts it, speed and acceptance as fledge does."""

from collections.abc import Sequence
from typing import Any

from fledge.contracts.outputs import Stats


def usage(num_prompt: int, num_answer: int, num_cached: int = 0) -> dict[str, Any]:
    """OpenAI's usage; cached tokens are those whose cache entries were there already."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def speculation(stats: Sequence[Stats]) -> dict[str, Any]:
    """How the answers of a request came about, taken together."""
    num_tokens = sum(one.num_tokens for one in stats)
    cycles = sum(one.cycles for one in stats)
    num_emitted = num_tokens - len(stats)
    # Answers to one request are made side by side: the longest says how long it took.
    seconds = max((one.prefill_s + one.decode_s for one in stats), default=0.0)
    return {
        "accept_length": round(num_emitted / cycles, 4) if cycles else None,
        "tokens_per_s": round(num_tokens / seconds, 3) if seconds > 0 else None,
        "cycles": cycles,
        "offered_at_depth": _sums([one.offered_at_depth for one in stats]),
        "accepted_at_depth": _sums([one.accepted_at_depth for one in stats]),
        "queue_s": round(max((one.queue_s for one in stats), default=0.0), 6),
        "time_to_first_token_s": round(
            max((one.time_to_first_token_s for one in stats), default=0.0), 6
        ),
    }


def _sums(rows: Sequence[tuple[int, ...]]) -> list[int]:
    sums = [0] * max(map(len, rows), default=0)
    for row in rows:
        for depth, count in enumerate(row):
            sums[depth] += count
    return sums
