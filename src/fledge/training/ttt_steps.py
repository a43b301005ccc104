"""The head run K times over a micro-batch, each time from its own last output.

Legend: T tokens, A of them in suffixes, F tapped features, D hidden size, V target's vocabulary.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fledge.models.head import AttentionInput, Eagle3Head, HeadOutput
from fledge.ops.attention import AttentionSpec
from fledge.ops.draft_attention import StepKeys, attend_step, attend_step_plain
from fledge.ops.micro_batch import MicroBatch
from fledge.ops.suffixes import Suffixes, whole

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")
_Before = Callable[[Eagle3Head, Tensor, Tensor, Tensor], AttentionInput]
_After = Callable[[Eagle3Head, Tensor, Tensor], HeadOutput]


class PlainSteps(nn.Module):
    """All steps through the code that serving runs; a module so that its weights can be cast."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        batch: MicroBatch,
        suffixes: None,
        features_TF: Tensor,
        embedding_VD: Tensor,
        num_steps: int,
    ) -> list[Tensor]:
        """The normed outputs [T, D] of all steps, everywhere."""
        head, documents, spec = self.head, batch.documents, _attention_spec(self.head)
        hidden_TD = head.fuse(features_TF)
        seen: StepKeys | None = None

        def attend(query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> Tensor:
            nonlocal seen
            own = (keys_TGD, values_TGD)
            seen = StepKeys(*own) if seen is None else seen.extended(*own)
            return attend_step_plain(query_THD, seen, documents, spec)

        normed = []
        for step in range(num_steps):
            # What runs over a document's end has no label there, and nobody else sees it.
            tokens_T = torch.roll(batch.token_ids_T, -(1 + step))
            embeds_TD = head.embed(tokens_T, embedding_VD).to(hidden_TD.dtype)
            positions_T = documents.positions_T + 1 + step
            hidden_TD, normed_TD = head(embeds_TD, hidden_TD, positions_T, attend)
            normed.append(normed_TD)
        return normed


class FastSteps(nn.Module):
    """The same without scores, and only where labels are reached from."""

    def __init__(self, head: Eagle3Head, *, is_compiled: bool) -> None:
        super().__init__()
        self.head = head
        self._before: _Before = before_attention
        self._after: _After = after_attention
        if is_compiled:
            self._before, self._after = _compiled_halves(repr(head.config))

    def forward(
        self,
        batch: MicroBatch,
        suffixes: Suffixes | None,
        features_TF: Tensor,
        embedding_VD: Tensor,
        num_steps: int,
    ) -> list[Tensor]:
        """The normed outputs of all steps, [T, D], or those of the suffixes."""
        head, documents = self.head, batch.documents
        spec, asked = _attention_spec(head), suffixes or whole(documents)
        hidden_TD = head.fuse(features_TF)
        positions_T = documents.positions_T
        seen: StepKeys | None = None
        normed = []
        for step in range(num_steps):
            tokens_T = torch.roll(batch.token_ids_T, -(1 + step))
            if step and suffixes is not None:
                tokens_T = tokens_T[suffixes.rows_A]
            embeds_TD = head.embed(tokens_T, embedding_VD).to(hidden_TD.dtype)
            residual_TD, query, keys, values = self._before(
                head, embeds_TD, hidden_TD, positions_T + 1 + step
            )
            if seen is not None:
                seen = seen.extended(keys, values)
            else:
                seen = StepKeys(keys, values)
                if suffixes is not None:
                    # Whole documents are seen; from here on only their ends go on.
                    rows_A = suffixes.rows_A
                    residual_TD, query = residual_TD[rows_A], query[rows_A]
                    positions_T = positions_T[rows_A]
            attended_THD = attend_step(query, seen, asked, spec)
            hidden_TD, normed_TD = self._after(head, residual_TD, attended_THD)
            normed.append(normed_TD)
        return normed


def before_attention(
    head: Eagle3Head, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor
) -> AttentionInput:
    return head.midlayer.before_attention(embeds_TD, hidden_TD, positions_T)


def after_attention(head: Eagle3Head, residual_TD: Tensor, attended_THD: Tensor) -> HeadOutput:
    return head.finish(head.midlayer.after_attention(residual_TD, attended_THD))


def _attention_spec(head: Eagle3Head) -> AttentionSpec:
    return AttentionSpec(scale=head.config.head_dim**-0.5, window=head.config.sliding_window)


@cache
def _compiled_halves(shape: str) -> tuple[_Before, _After]:
    """Attention stays outside: it is a kernel of its own, with its own backward pass.

    Each shape of head gets its own: torch gives up on a function that it compiled for many.
    """
    del shape
    return torch.compile(_copied(before_attention)), torch.compile(_copied(after_attention))


def _copied(function: Callable[_Inputs, _Output]) -> Callable[_Inputs, _Output]:
    """The same code as an object of its own, which is what torch counts by."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__)
