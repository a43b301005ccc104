"""The same row of a request in passes of many kinds: alone, in a chain of drafts, in a chunk.

Legend: H query heads, S slots, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.tree import TreeBatch
from tests.paged_cases import BLOCK_SIZE, Heads


@dataclass(frozen=True)
class Company:
    """Requests that bring so many rows each, as a chain of drafts or as a chunk of a prompt."""

    requests: int
    rows: int
    is_chunk: bool = False

    def __str__(self) -> str:
        return f"{self.requests} {'chunks' if self.is_chunk else 'chains'} of {self.rows}"


class Request:
    """Keys and values of one request, and queries that follow its context."""

    def __init__(
        self, heads: Heads, most_tokens: int, spec: AttentionSpec, like: Tensor, *, seed: int = 0
    ) -> None:
        """`like` has the precision and the device."""
        generator = torch.Generator(device=like.device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)

        num_blocks = -(-most_tokens // BLOCK_SIZE)
        self._spec = spec
        self._blocks_P = torch.randperm(num_blocks, generator=generator, device=like.device)
        self._keys_SGD = random(num_blocks * BLOCK_SIZE, heads.key, heads.size)
        self._values_SGD = random(num_blocks * BLOCK_SIZE, heads.key, heads.size)
        self._query_SHD = random(most_tokens, heads.query, heads.size)

    def attend(self, context: int, company: Company) -> Tensor:
        """The request as often as it is said, [requests, rows, H, D]."""
        from fledge.ops.paged_attention_triton import attend_paged

        packed = self._pass(context, company)
        query_RHD = self._query_SHD[context : context + company.rows]
        out = attend_paged(
            packed.paged(self._spec.window),
            query_RHD.repeat(company.requests, 1, 1),
            self._keys_SGD,
            self._values_SGD,
            self._spec,
        )
        return out.view(company.requests, company.rows, *out.shape[1:])

    def attend_alone(self, context: int, num_rows: int) -> Tensor:
        """Rows one after the other, each in a pass of its own, [rows, H, D]."""
        passes = range(context, context + num_rows)
        return torch.cat([self.attend(number, Company(1, 1))[0] for number in passes])

    def _pass(self, context: int, company: Company) -> TreePass:
        count, device = company.requests, self._blocks_P.device
        chain = company.rows if company.is_chunk else 1
        return make_tree_pass(
            chain_tokens_C=torch.zeros(count * chain, dtype=torch.long, device=device),
            chain_B=torch.full((count,), chain, device=device),
            context_B=torch.full((count,), context, device=device),
            trees=None if chain == company.rows else _chains(company, device),
            num_rows=count * company.rows,
            tables=BlockTables(
                BLOCK_SIZE, {self._spec.window: self._blocks_P.repeat(company.requests, 1)}
            ),
            num_short=0 if company.is_chunk else count,
        )


def _chains(company: Company, device: torch.device) -> TreeBatch:
    """Every draft below the one before it."""
    above_N = (torch.arange(company.rows, device=device) - 1).clamp(min=0)
    parents_BN = above_N.repeat(company.requests, 1)
    return TreeBatch(
        tokens_BN=torch.zeros_like(parents_BN),
        parents_BN=parents_BN,
        sizes_B=torch.full((company.requests,), company.rows, device=device),
        logprobs_BN=torch.zeros(parents_BN.shape, device=device),
        num_drafts=company.requests * (company.rows - 1),
    )
