"""The head run K times over a micro-batch, each time from its own last output.

Legend: T tokens, F tapped features, D hidden size, V vocabulary of the target.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from fledge.models.head import AttentionInput, Eagle3Head, HeadOutput
from fledge.ops.attention import AttentionSpec
from fledge.ops.draft_attention import StepKeys, attend_step, attend_step_plain
from fledge.ops.micro_batch import MicroBatch
from fledge.ops.suffixes import Suffixes, whole

_Before = Callable[[Eagle3Head, Tensor, Tensor, Tensor], AttentionInput]
_After = Callable[[Eagle3Head, Tensor, Tensor], HeadOutput]


class HeadSteps(nn.Module):
    """All steps as one module, so that `functional_call` can put cast weights into it."""

    def __init__(self, head: Eagle3Head, *, is_plain: bool, is_compiled: bool) -> None:
        super().__init__()
        self.head = head
        self._is_plain = is_plain
        self._before, self._after = _compiled_halves() if is_compiled else (_before, _after)

    def forward(
        self,
        batch: MicroBatch,
        suffixes: Suffixes | None,
        features_TF: Tensor,
        embedding_VD: Tensor,
        num_steps: int,
    ) -> list[Tensor]:
        """The normed outputs of all steps, [T, D], or of the suffixes only; the twin has none."""
        head, documents = self.head, batch.documents
        spec = AttentionSpec(scale=head.config.head_dim**-0.5, window=head.config.sliding_window)
        hidden_TD = head.fuse(features_TF)
        rows_A = None if suffixes is None else suffixes.rows_A
        asked = whole(documents) if suffixes is None else suffixes
        positions_T = documents.positions_T
        seen: StepKeys | None = None
        normed = []
        for step in range(num_steps):
            # What runs over a document's end has no label there, and nobody else sees it.
            tokens_T = torch.roll(batch.token_ids_T, -(1 + step))
            if step and rows_A is not None:
                tokens_T = tokens_T[rows_A]
            embeds_TD = head.embed(tokens_T, embedding_VD).to(hidden_TD.dtype)
            residual_TD, query, keys, values = self._before(
                head, embeds_TD, hidden_TD, positions_T + 1 + step
            )
            if seen is None:
                # The whole documents are seen; from here on only their ends go on.
                seen = StepKeys(keys, values)
                if rows_A is not None:
                    residual_TD, query = residual_TD[rows_A], query[rows_A]
                    positions_T = positions_T[rows_A]
            else:
                seen = seen.extended(keys, values)
            if self._is_plain:
                attended_THD = attend_step_plain(query, seen, documents, spec)
            else:
                attended_THD = attend_step(query, seen, asked, spec)
            hidden_TD, normed_TD = self._after(head, residual_TD, attended_THD)
            normed.append(normed_TD)
        return normed


def _before(
    head: Eagle3Head, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor
) -> AttentionInput:
    return head.midlayer.before_attention(embeds_TD, hidden_TD, positions_T)


def _after(head: Eagle3Head, residual_TD: Tensor, attended_THD: Tensor) -> HeadOutput:
    return head.finish(head.midlayer.after_attention(residual_TD, attended_THD))


@cache
def _compiled_halves() -> tuple[_Before, _After]:
    """Attention stays outside: it is a kernel of its own, with its own backward pass."""
    return torch.compile(_before), torch.compile(_after)
