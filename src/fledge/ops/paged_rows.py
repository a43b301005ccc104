"""What the attention kernel reads of a pass: lengths and tables that never leave the device.

Rows of a request, and the keys they may see, by token number:

    tree      rows      c0 c1 a b        numbers  4 5 6 7       context 4, chain 2
    frontier  rows      x y              numbers  4 .. 9        context 4, scratch 6 (3 levels of 2)

A row sees the context, the chain up to itself, and what `seen_BRS` says of the rest. A window
narrows that by positions.

Legend: B requests, T rows of the pass, P blocks of a table, R rows and S keys of the visibility
that no rule can say: nodes of a tree with its root, or frontier nodes and scratch entries.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Chains with trees below them, end to end; requests bring different numbers of rows."""

    starts_B: Tensor
    num_rows_B: Tensor
    chain_B: Tensor
    first_B: Tensor


@dataclass(frozen=True, slots=True)
class FrontierRows:
    """So many nodes of every request, which see scratch entries of so many levels."""

    width: int
    level: int
    first_number: int


@dataclass(frozen=True, slots=True)
class PagedRows:
    """One pass as layers with one kind of attention see it."""

    rows: TreeRows | FrontierRows
    context_B: Tensor
    positions_T: Tensor
    seen_BRS: Tensor | None
    table_BP: Tensor
    block_size: int
    is_short: bool = False
    """Whether all requests bring few rows, and about as many."""

    @property
    def num_requests(self) -> int:
        return self.context_B.shape[0]

    @property
    def num_rows(self) -> int:
        return self.positions_T.shape[0]

    @property
    def lengths(self) -> tuple[TreeRows, FrontierRows]:
        """Both kinds for kernels: what one does not look at still needs a pointer."""
        context = self.context_B
        if isinstance(self.rows, FrontierRows):
            return TreeRows(context, context, context, context), self.rows
        return self.rows, FrontierRows(1, 1, 0)
