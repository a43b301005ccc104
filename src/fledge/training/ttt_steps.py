"""The head run K times over a micro-batch, each time from its own last output.

Legend: T tokens, A of them in suffixes, F tapped features, D hidden size, V vocabulary of the
target, Q query, key and value sizes together.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fledge.models.head import AttentionInput, Eagle3Head, HeadLayer, HeadOutput
from fledge.ops.attention import AttentionSpec
from fledge.ops.draft_attention import StepKeys, attend_step, attend_step_plain
from fledge.ops.micro_batch import MicroBatch
from fledge.ops.suffixes import Suffixes, whole
from fledge.ops.unique_rows import take_rows
from fledge.training.joined_head import (
    after_attention,
    before_attention,
    join_weights,
    read_embeddings,
)

_Inputs = ParamSpec("_Inputs")
_Output = TypeVar("_Output")
_Before = Callable[[HeadLayer, Tensor, Tensor, Tensor, Tensor], AttentionInput]
_After = Callable[[Eagle3Head, Tensor, Tensor, Tensor], HeadOutput]


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
    """The same with joined matrices, and without what no label is reached from."""

    def __init__(self, head: Eagle3Head, *, is_compiled: bool) -> None:
        super().__init__()
        self.head = head
        halves = (before_attention, after_attention)
        self._before, self._after = _compiled_halves(repr(head.config)) if is_compiled else halves

    def forward(
        self,
        batch: MicroBatch,
        suffixes: Suffixes | None,
        features_TF: Tensor,
        embedding_VD: Tensor,
        num_steps: int,
    ) -> list[Tensor]:
        """The normed outputs of all steps, [T, D], or those of the suffixes."""
        head, layer, documents = self.head, self.head.midlayer, batch.documents
        spec, asked = _attention_spec(head), suffixes or whole(documents)
        joined = join_weights(layer)
        embeds_TD = head.embed(batch.token_ids_T, embedding_VD).to(features_TF.dtype)
        read_TQ = read_embeddings(layer, joined, embeds_TD)
        hidden_TD = head.fuse(features_TF)
        rows_A = torch.arange(documents.num_tokens, device=documents.device)
        positions_A = documents.positions_T
        seen: StepKeys | None = None
        normed = []
        for step in range(num_steps):
            # What runs over a document's end has no label there, and nobody else sees it.
            ahead_A = (rows_A + 1 + step) % documents.num_tokens
            residual_AD, query, keys, values = self._before(
                layer,
                joined.hidden_QD,
                take_rows(read_TQ, ahead_A),
                hidden_TD,
                positions_A + step + 1,
            )
            if seen is not None:
                seen = seen.extended(keys, values)
            else:
                seen = StepKeys(keys, values)
                if suffixes is not None:
                    # Whole documents are seen; from here on only their ends go on.
                    rows_A, positions_A = suffixes.rows_A, positions_A[suffixes.rows_A]
                    residual_AD, query = take_rows(residual_AD, rows_A), take_rows(query, rows_A)
            attended_AHD = attend_step(query, seen, asked, spec)
            hidden_TD, normed_AD = self._after(head, joined.gate_up_MD, residual_AD, attended_AHD)
            normed.append(normed_AD)
        return normed


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
