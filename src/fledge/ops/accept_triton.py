"""The walk down the trees in two launches: every node chooses its token, then requests walk.

What a node chooses depends on its logits, its request and its depth, not on the way that led there,
as long as nobody has penalties or filters. So all nodes choose at once, each by several programs
that share its vocabulary, and a walk only looks up. The twin is the loop of `walk_gumbel`.

Legend: B requests, N nodes, R rows of logits, V vocabulary, P parts of the vocabulary, L levels,
C columns of a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.noise_triton import gumbel_at, noise_base
from fledge.ops.paged_shape import power_of_two
from fledge.ops.sampling import SamplingBatch
from fledge.ops.tree import TreeBatch

_PART = 8192
_COLUMNS = 1024
_NO_TOKEN = tl.constexpr(2**62)


@triton.jit
def _base_of(place, node, seed, position, parents_ptr, num_nodes):
    """Mixed seed and output position of a node: its request's, and its depth below the root."""
    depth, above = 0, node
    # A node may be written below itself: then it is no draft, and nobody asks for its depth.
    while (above > 0) & (depth < num_nodes):
        above = tl.load(parents_ptr + place - node + above)
        depth += 1
    return noise_base(seed, position + depth)


@triton.jit(do_not_specialize=["num_nodes"])
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    parents_ptr,
    sizes_ptr,
    greedy_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    scores_ptr,
    choices_ptr,
    num_nodes,
    logits_stride,
    vocab_size,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAN_SAMPLE: tl.constexpr,
):
    """Best score of a node in a part of the vocabulary, and where; NaN if anything is no number."""
    place, part = tl.program_id(0), tl.program_id(1)
    request, node = place // num_nodes, (place % num_nodes).to(tl.int64)
    if node >= tl.load(sizes_ptr + request):
        return
    if CAN_SAMPLE:
        is_sampled = tl.load(greedy_ptr + request) == 0
        temperature = tl.load(temperature_ptr + request)
        seed, position = tl.load(seed_ptr + request), tl.load(position_ptr + request)
        base = _base_of(place, node, seed, position, parents_ptr, num_nodes)
    row_ptr = logits_ptr + tl.load(rows_ptr + place) * logits_stride
    best_C = tl.full([COLUMNS], float("-inf"), tl.float64)
    choice_C = tl.zeros([COLUMNS], tl.int64)
    is_bad_C = tl.zeros([COLUMNS], tl.int32)
    for begin in range(part * PART, tl.minimum(part * PART + PART, vocab_size), COLUMNS):
        columns_C = begin + tl.arange(0, COLUMNS)
        is_there_C = columns_C < vocab_size
        score_C = tl.load(row_ptr + columns_C, mask=is_there_C, other=float("-inf")).to(tl.float64)
        is_bad_C |= ((score_C != score_C) | (score_C == float("inf"))).to(tl.int32)
        if CAN_SAMPLE:  # noqa: SIM102 (known when the kernel is compiled)
            if is_sampled:
                score_C = score_C / temperature + gumbel_at(base, columns_C)
        is_better_C = score_C > best_C
        best_C = tl.where(is_better_C, score_C, best_C)
        choice_C = tl.where(is_better_C, columns_C, choice_C)
    best = tl.max(best_C, axis=0)
    choice = tl.min(tl.where(best_C == best, choice_C, _NO_TOKEN), axis=0)
    best = tl.where(tl.max(is_bad_C, axis=0) > 0, float("nan"), best)
    tl.store(scores_ptr + place * tl.num_programs(1) + part, best)
    tl.store(choices_ptr + place * tl.num_programs(1) + part, choice)


@triton.jit(do_not_specialize=["num_nodes", "num_parts", "num_levels"])
def _walk_kernel(
    scores_ptr,
    choices_ptr,
    drafts_ptr,
    parents_ptr,
    sizes_ptr,
    tokens_ptr,
    nodes_ptr,
    lengths_ptr,
    failed_ptr,
    num_nodes,
    num_parts,
    num_levels,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One request from its root down, while a child holds the token of its parent's choice."""
    request = tl.program_id(0)
    nodes_N, parts_P = tl.arange(0, NODES), tl.arange(0, PARTS)
    is_draft_N = (nodes_N > 0) & (nodes_N < tl.load(sizes_ptr + request))
    first = request * num_nodes
    parents_N = tl.load(parents_ptr + first + nodes_N, mask=is_draft_N, other=-1)
    drafts_N = tl.load(drafts_ptr + first + nodes_N, mask=is_draft_N, other=-1)
    node, length, is_walking, has_failed = 0, 0, 1, 0
    for level in range(num_levels):
        places_P = (first + node) * num_parts + parts_P
        is_part_P = parts_P < num_parts
        score_P = tl.load(scores_ptr + places_P, mask=is_part_P, other=float("-inf"))
        choice_P = tl.load(choices_ptr + places_P, mask=is_part_P, other=0)
        is_number_P = score_P == score_P
        best = tl.max(tl.where(is_number_P, score_P, float("-inf")), axis=0)
        token = tl.min(tl.where(score_P == best, choice_P, _NO_TOKEN), axis=0)
        is_bad = (tl.min(is_number_P.to(tl.int32), axis=0) == 0) | (best == float("-inf"))
        token = tl.where(is_bad, 0, token)
        is_child_N = is_draft_N & (parents_N == node) & (drafts_N == token)
        child = tl.min(tl.where(is_child_N, nodes_N, NODES), axis=0)
        has_failed = tl.where(is_bad & (is_walking > 0), 1, has_failed)
        tl.store(tokens_ptr + request * num_levels + level, token)
        tl.store(nodes_ptr + request * num_levels + level, node)
        length += is_walking
        is_walking = tl.where((child < NODES) & (has_failed == 0), is_walking, 0)
        node = tl.where(is_walking > 0, child, node)
    tl.store(lengths_ptr + request, length)
    tl.store(failed_ptr + request, has_failed)


class Steps(NamedTuple):
    tokens_BL: Tensor
    nodes_BL: Tensor
    lengths_B: Tensor
    failed_B: Tensor


def walk_nodes(
    logits_RV: Tensor,
    rows_BN: Tensor,
    tree: TreeBatch,
    batch: SamplingBatch,
    position_B: Tensor,
    *,
    num_levels: int,
) -> Steps:
    """All requests at once; nobody may have penalties or filters."""
    num_requests, num_nodes = tree.tokens_BN.shape
    vocab_size = logits_RV.shape[1]
    num_parts = triton.cdiv(vocab_size, _PART)
    places = (num_requests, num_nodes, num_parts)
    scores_BNP = logits_RV.new_empty(places, dtype=torch.float64)
    choices_BNP = logits_RV.new_empty(places, dtype=torch.long)
    rows_BN, drafts_BN = rows_BN.contiguous(), tree.tokens_BN.contiguous()
    parents_BN = tree.parents_BN.contiguous()
    _choose_kernel[(num_requests * num_nodes, num_parts)](
        logits_RV,
        rows_BN,
        parents_BN,
        tree.sizes_B,
        batch.greedy_B.view(torch.uint8),
        batch.temperature_B,
        batch.seed_B,
        position_B,
        scores_BNP,
        choices_BNP,
        num_nodes,
        logits_RV.stride(0),
        vocab_size,
        PART=_PART,
        COLUMNS=_COLUMNS,
        CAN_SAMPLE=not batch.all_greedy,
    )
    steps = torch.empty(2, num_requests, num_levels, dtype=torch.long, device=logits_RV.device)
    lengths_B = torch.empty(num_requests, dtype=torch.long, device=logits_RV.device)
    failed_B = torch.empty(num_requests, dtype=torch.bool, device=logits_RV.device)
    _walk_kernel[(num_requests,)](
        scores_BNP,
        choices_BNP,
        drafts_BN,
        parents_BN,
        tree.sizes_B,
        steps[0],
        steps[1],
        lengths_B,
        failed_B.view(torch.uint8),
        num_nodes,
        num_parts,
        num_levels,
        NODES=max(16, power_of_two(num_nodes)),
        PARTS=max(16, power_of_two(num_parts)),
    )
    return Steps(steps[0], steps[1], lengths_B, failed_B)
