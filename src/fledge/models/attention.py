"""The bridge from transformers' attention modules to our cache and attention.

transformers lets a model call a registered function in place of its own attention and passes
unknown keyword arguments of `model(...)` on to it. We register one, and hand it the pass and the
pool, or documents that are read whole and need no pool. It then does everything transformers would:
causality, tree, window, soft-cap and sinks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fledge.contracts.errors import MismatchError
from fledge.ops.attention import AttentionSpec, attend_fast, attend_padded, can_be_padded
from fledge.ops.document_attention import DocumentAttention
from fledge.ops.kernel_choice import uses_kernels
from fledge.ops.kv import KVMemory, KVPool
from fledge.ops.packed import PassView
from fledge.ops.paged import Pass
from fledge.ops.paged_attention import attend_pages

ATTENTION_NAME = "fledge"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What every attention layer of one forward pass over cached sequences needs to know."""

    packed: Pass
    memory: KVMemory

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        return attend_packed(self.packed, self.memory, layer, query_THD, keys_TGD, values_TGD, spec)


@dataclass(frozen=True, slots=True)
class DocumentsCall:
    """The same for a pass over whole documents."""

    documents: DocumentAttention

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        del layer
        return self.documents.attend(query_THD, keys_TGD, values_TGD, spec)


def attend_packed(
    packed: Pass,
    memory: KVMemory,
    layer: int,
    query_THD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Store the pass's keys and values, then attend; returns [T, H, D]."""
    slots_T = packed.view(spec.window).write_slots_T
    memory.for_window(spec.window).write(layer, slots_T, keys_TGD, values_TGD)
    return attend_stored(packed, memory, layer, query_THD, spec)


def attend_stored(
    packed: Pass, memory: KVMemory, layer: int, query_THD: Tensor, spec: AttentionSpec
) -> Tensor:
    """Attend where the pass's keys and values are stored already; returns [T, H, D]."""
    view, pool = packed.view(spec.window), memory.for_window(spec.window)

    def attend_views() -> Tensor:
        return _attend_views(view, pool, layer, query_THD, spec)

    if uses_kernels(query_THD):
        rows = packed.paged(spec.window)
        if rows is not None:
            keys_SGD, values_SGD = pool.layer(layer)
            return attend_pages(rows, query_THD, keys_SGD, values_SGD, spec, attend_views)
    return attend_views()


def _attend_views(
    view: PassView, pool: KVPool, layer: int, query_THD: Tensor, spec: AttentionSpec
) -> Tensor:
    """Short requests together if that pays, the others one by one."""
    if view.padded is not None and can_be_padded(spec):
        first = view.padded.rows_BQ.shape[0]
        keys_BKGD, values_BKGD = pool.read(layer, view.padded.slots_BK)
        outputs = [attend_padded(query_THD, keys_BKGD, values_BKGD, view.padded, spec)]
    else:
        first, outputs = 0, []
    for segment in view.segments(first):
        keys_KGD, values_KGD = pool.read(layer, segment.key_slots_K)
        outputs.append(attend_fast(query_THD[segment.rows], keys_KGD, values_KGD, segment, spec))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    fledge_call: AttentionCall | DocumentsCall | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if fledge_call is None:
        raise MismatchError(
            f"{type(module).__name__} does not pass arguments of the model on to its attention, "
            "so fledge cannot drive this architecture."
        )
    # Some models pass the window, others leave it on the module.
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    out_THD = fledge_call.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query_1HTD[0].transpose(0, 1),
        key_1GTD[0].transpose(0, 1),
        value_1GTD[0].transpose(0, 1),
        AttentionSpec(scale=scaling, window=window, soft_cap=softcap, sinks_H=s_aux),
    )
    return out_THD[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)
