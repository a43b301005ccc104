"""Output rows that are the target's own, all turned by one learned matrix.

    logits = rows (turn normed)        rows: the target's, of the drafted tokens

A head with rows of its own spends half of its weights on them, and each drafted token costs a row.
Here a token costs nothing to store, so that more of them can be drafted. Who serves multiplies the
two once and has an ordinary head.

Legend: V draft vocabulary, D hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.models.target_reading import Readout


class TurnedRows(nn.Module):
    """Takes the place of a head's `lm_head` in training and in files."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.eye(size))
        # Neither a parameter nor a buffer: the rows are the target's, and nobody may save,
        # broadcast or shard them.
        self.rows_VD: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The rows as an ordinary `lm_head` has them; gradients reach the matrix."""
        return turned(self.target_rows_VD, self.turn)

    @property
    def target_rows_VD(self) -> Tensor:
        assert self.rows_VD is not None, "nobody brought the target's rows"
        return self.rows_VD

    def forward(self, normed_TD: Tensor) -> Tensor:
        return F.linear(normed_TD, self.weight)

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Rows move and are cast with the module."""
        if self.rows_VD is not None:
            self.rows_VD = change(self.rows_VD)
        return super()._apply(change, recurse)  # type: ignore[no-untyped-call]


def turned(rows_VD: Tensor, turn_DD: Tensor) -> Tensor:
    """Rows that make of a state what the target's make of the turned state."""
    return rows_VD.to(turn_DD.dtype) @ turn_DD


def target_rows(readout: Readout, draft_ids_V: Tensor) -> Tensor:
    """Output rows of some tokens, with the factor that the target puts on its logits."""
    rows_VD = readout.weight_VD[draft_ids_V.to(readout.weight_VD.device)]
    return rows_VD.detach().float().cpu() * readout.scale
