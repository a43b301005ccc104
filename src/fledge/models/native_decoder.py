"""A target's pass on a CPU in one call of the native kernels; `FastDecoder`'s layers are its twin.

It reads the same weights, packed where floats have few bits (`ops/native_product.py`), and the same
paged memory. Float32 only, and dense layers only; whole documents that are read without a cache go
through the twin. A row has the same bits however many rows are beside it.

Legend: T tokens, R rows with logits, D hidden size, F tapped features.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fledge.contracts.errors import CapacityError
from fledge.models.fast_layers import DenseMlp, FastLayer
from fledge.ops.kv import KVMemory
from fledge.ops.native_library import NativeLibrary, NoNativeKernelsError
from fledge.ops.native_memory import WeightMemory
from fledge.ops.native_product import NativeMatrix
from fledge.ops.native_structs import (
    CDecoder,
    CHeads,
    CLayer,
    CPass,
    CView,
    Kept,
    describe_rows,
    describe_view,
)
from fledge.ops.norms import Norm
from fledge.ops.paged import Pass
from fledge.ops.product import Product

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a decoder is made of."""

    layers: Sequence[FastLayer]
    final_norm: Norm
    to_logits: Product
    tables: dict[str, Tensor]
    """Cosines and sines of all positions by kind of rope."""

    hidden_size: int
    may_pack: bool
    """Whether there is room for packed weights beside the floats."""


class NativeDecoder:
    """The layers of one target, laid out for the native kernels."""

    def __init__(self, library: NativeLibrary, parts: DecoderParts) -> None:
        self.library, self._parts, self._kept = library, parts, Kept()
        self._memory = WeightMemory()
        self.windows = tuple(dict.fromkeys(layer.spec.window for layer in parts.layers))
        self._layers = [self._describe(layer) for layer in parts.layers]
        self._head = self._matrix(parts.to_logits, is_searched=True)
        self.vocab_size = int(self._head.num_rows)
        self._held: dict[tuple[int, ...], tuple[Any, CDecoder, Kept]] = {}

    @property
    def hidden_size(self) -> int:
        return self._parts.hidden_size

    @property
    def packed_bytes(self) -> int:
        """Memory that packed weights take beside the floats."""
        return self._packed_bytes

    _packed_bytes = 0

    def forward(
        self,
        packed: Pass,
        stream_TD: Tensor,
        memory: KVMemory,
        logit_rows_R: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Logits before the target shapes them, and taps; None for a pass that has no pages.

        `stream` holds the embeddings, and is written to.
        """
        paged = [packed.paged(window) for window in self.windows]
        if paged[0] is None or not stream_TD.is_contiguous():
            return None
        kept = Kept()
        num_rows, size = stream_TD.shape
        features_TF = stream_TD.new_empty(num_rows, size * len(taps))
        columns = list(torch.split(features_TF, size, dim=1)) if taps else []
        for tap, column in zip(taps, columns, strict=True):
            if tap == 0:
                column.copy_(stream_TD)
        num_logits = num_rows if logit_rows_R is None else logit_rows_R.shape[0]
        logits_RV = stream_TD.new_empty(num_logits, self.vocab_size)
        final_TD = torch.empty_like(stream_TD)
        views = (CView * len(paged))(
            *(
                describe_view(one, window, kept)
                for one, window in zip(paged, self.windows, strict=True)
                if one is not None
            )
        )
        described = CPass(
            describe_rows(paged[0], kept),
            views,
            len(paged),
            None,
            None,
            stream_TD.data_ptr(),
            features_TF.data_ptr(),
            features_TF.shape[1],
            final_TD.data_ptr(),
            kept.pointer(logit_rows_R),
            num_logits,
            logits_RV.data_ptr(),
            None,
        )
        decoder = self.layers_over(memory, stream_TD, tuple(taps))
        failed = self.library.run_pass(
            ctypes.byref(decoder), ctypes.byref(described), torch.get_num_threads()
        )
        if failed:
            raise CapacityError(
                f"there is no memory left for a pass of {num_rows} tokens; lower max_requests or "
                "max_pass_tokens."
            )
        repeat_taps(features_TF, taps)
        return logits_RV, columns

    def _matrix(self, product: Product, *, is_searched: bool = False) -> Any:
        matrix = NativeMatrix(
            self.library,
            product.weight_NK,
            product.bias_N,
            sizes=product.sizes,
            may_pack=self._parts.may_pack,
            memory=self._memory,
            is_searched=is_searched,
        )
        self._packed_bytes += matrix.packed_bytes
        return self._kept.matrix(matrix)

    def _describe(self, layer: FastLayer) -> CLayer:
        if not isinstance(layer.mlp, DenseMlp):
            raise NoNativeKernelsError("its layers have experts")
        if layer.spec.sinks_H is not None:
            raise NoNativeKernelsError("its attention has sinks")
        if len(layer.mlp.gate_up.sizes) != 2:
            raise NoNativeKernelsError("its gates and ups are one matrix")
        heads, norm = layer.heads, self._kept.norm
        widths = layer.width_norms or (None, None)
        return CLayer(
            qkv=self._matrix(layer.qkv),
            out=self._matrix(layer.out),
            gate_up=self._matrix(layer.mlp.gate_up),
            down=self._matrix(layer.mlp.down),
            before_attention=norm(layer.before_attention),
            after_attention=norm(layer.after_attention),
            before_mlp=norm(layer.before_mlp),
            after_mlp=norm(layer.after_mlp),
            head_norm=norm(heads.norm),
            query_width=norm(widths[0]),
            key_width=norm(widths[1]),
            heads=CHeads(
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                layer.spec.scale,
                layer.spec.soft_cap or 0.0,
            ),
            rotation=self._kept.pointer(self._parts.tables[layer.rope]),
            view=self.windows.index(layer.spec.window),
            activation=_ACTIVATIONS[layer.mlp.activation],
        )

    def layers_over(self, memory: KVMemory, like: Tensor, taps: tuple[int, ...]) -> CDecoder:
        """The layers with the memory they write to, made once for each memory and taps."""
        key = (id(memory), *taps)
        held = self._held.get(key)
        if held is not None and held[0]() is memory:
            return held[1]
        kept, size = Kept(), self._parts.hidden_size
        layers = (CLayer * len(self._layers))(*self._layers)
        for c, layer in zip(layers, self._parts.layers, strict=True):
            shape = (layer.heads.num_kv_heads, layer.heads.head_dim)
            keys, values = memory.for_window(layer.spec.window).hold(
                layer.index, like, shape, shape
            )
            c.keys, c.values = kept.pointer(keys), kept.pointer(values)
            tap = layer.index + 1
            c.tap = taps.index(tap) * size if tap in taps else -1
        decoder = CDecoder(
            layers, len(layers), size, self._kept.norm(self._parts.final_norm), self._head
        )
        self._held = {k: one for k, one in self._held.items() if one[0]() is not None}
        self._held[key] = (weakref.ref(memory), decoder, kept)
        return decoder


def repeat_taps(features_TF: Tensor, taps: Sequence[int]) -> None:
    """A layer leaves its features once: targets of few layers are tapped twice at the same one."""
    if len(set(taps)) < len(taps):
        columns = torch.split(features_TF, features_TF.shape[1] // len(taps), dim=1)
        for place, tap in enumerate(taps):
            if (first := taps.index(tap)) < place:
                columns[place].copy_(columns[first])
