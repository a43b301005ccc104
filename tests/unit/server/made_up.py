"""Figures of an answer that nobody gave."""

from fledge.contracts.outputs import Stats

STATS = Stats(
    num_tokens=9,
    cycles=4,
    queue_s=0.5,
    prefill_s=1.0,
    decode_s=3.0,
    longest_gap_s=0.2,
    num_prompt_reused=2,
    num_preemptions=0,
    offered_at_depth=(4, 3),
    accepted_at_depth=(3, 1),
)
