"""A head's step on a CPU in one call of the native kernels; `Eagle3Head` is its twin.

Weights are rounded to 4 bits in groups of 32: a step reads a sixth of the memory, and drafts only
decide how fast an answer comes. The fused features are made of unrounded weights, and so are the
highest logits.

Legend: T tokens, R rows whose output is asked for, D hidden size, F tapped features, P positions.
"""

import ctypes
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head, HeadOutput, ServingProducts
from fledge.models.head_config import HeadConfig
from fledge.ops.attention import AttentionSpec
from fledge.ops.kv import KVPool
from fledge.ops.native_library import NativeLibrary
from fledge.ops.native_memory import WeightMemory
from fledge.ops.native_product import CMatrix, Format, NativeMatrix
from fledge.ops.native_structs import (
    CDecoder,
    CHeads,
    CLayer,
    CStep,
    Kept,
    describe_rows,
    describe_view,
)
from fledge.ops.norms import Norm
from fledge.ops.paged import Pass
from fledge.ops.product import Product

_FORMAT = Format.FOUR_HALF
"""In 8 bits 1 to 2% more drafts are accepted, and a step reads twice as much."""


_MOST_SHARPENED, _REACH = 8, 3.0
"""Logits that are made anew, and how far below the best; `native/sharpen.h` has them too."""


class SharpenedLogits:
    """Products with rounded rows, the highest of which are made anew of the rows as they are.

    Where tokens are nearly as probable as each other, rounding would decide between them.
    """

    def __init__(self, matrix: NativeMatrix, rows_VD: Tensor) -> None:
        self._matrix, self.rows_VD = matrix, rows_VD.detach()

    @property
    def c(self) -> CMatrix:
        """Of the rounded rows."""
        return self._matrix.c

    def __call__(self, normed_TD: Tensor) -> Tensor:
        logits_TV = self._matrix(normed_TD)
        count = min(_MOST_SHARPENED, logits_TV.shape[1])
        found = logits_TV.topk(count, dim=-1)
        exact_TC = (self.rows_VD[found.indices] @ normed_TD[..., None]).squeeze(-1)
        is_near_TC = found.values >= found.values[:, :1] - _REACH
        # What is alone at the top stays as it is, as nothing comes between.
        is_near_TC &= is_near_TC.sum(dim=-1, keepdim=True) > 1
        sharpened_TC = torch.where(is_near_TC, exact_TC, found.values)
        return logits_TV.scatter(1, found.indices, sharpened_TC)


class NativeProducts(NamedTuple):
    to_logits: SharpenedLogits
    to_hidden: NativeMatrix
    """From tapped features."""


class NativeHead:
    """One head laid out for the native kernels, anew when other weights were loaded into it."""

    def __init__(
        self,
        library: NativeLibrary,
        head: Eagle3Head,
        embedding: Tensor,
        spec: AttentionSpec,
        table_PD: Tensor,
        *,
        products: tuple[Product, Product, Product, Product],
        layer: int,
    ) -> None:
        """`products` are those of queries, keys and values, of what attention returns, of gates and
        ups, and of what comes of them."""
        self.library, self._head, self._spec, self._layer = library, head, spec, layer
        self.embedding, self._table_PD, self._products = embedding, table_PD, products
        self._weights = tuple(head.parameters())
        self._versions: tuple[int, ...] = ()
        self._held: tuple[Any, CDecoder] | None = None
        self.refresh()

    def run(
        self,
        packed: Pass,
        hidden_XD: Tensor,
        rows_T: Tensor,
        outputs_R: Tensor | None,
        memory: KVPool,
    ) -> HeadOutput | None:
        """One draft step; None for a pass without pages."""
        paged = packed.paged(self._spec.window)
        if paged is None:
            return None
        self.refresh()
        kept, config = Kept(), self._head.config
        num_outputs = packed.num_tokens if outputs_R is None else outputs_R.shape[0]
        stream_RD, normed_RD = hidden_XD.new_empty(2, num_outputs, config.hidden_size).unbind()
        step = CStep(
            describe_rows(paged, kept),
            describe_view(paged, self._spec.window, kept),
            kept.pointer(packed.token_ids_T),
            kept.pointer(self.embedding),
            kept.pointer(hidden_XD),
            kept.pointer(rows_T),
            *self.input_norms,
            int(config.norm_before_residual),
            kept.pointer(outputs_R),
            num_outputs,
            stream_RD.data_ptr(),
            normed_RD.data_ptr(),
        )
        decoder = self.layers_over(memory, hidden_XD)
        failed = self.library.run_step(
            ctypes.byref(decoder), ctypes.byref(step), torch.get_num_threads()
        )
        if failed:
            raise MemoryError(f"no memory for a head's step over {packed.num_tokens} tokens")
        return HeadOutput(normed_RD if config.norm_output else stream_RD, normed_RD)

    @property
    def config(self) -> HeadConfig:
        return self._head.config

    @property
    def window(self) -> int | None:
        return self._spec.window

    @property
    def draft_to_target_V(self) -> Tensor:
        return self._head.draft_to_target_V

    @property
    def norms_features(self) -> bool:
        """Whether tapped features are not fused as they are."""
        return self.config.norm_before_fc or self.config.fc_norm

    def fusion_input(self, features_NF: Tensor) -> Tensor:
        """Tapped features as the fusing product reads them."""
        return self._head.fusion_input(features_NF)

    def refresh(self) -> None:
        """Pack the weights, unless they are those that were packed last."""
        head = self._head
        versions = tuple(weight._version for weight in self._weights)
        if versions == self._versions:
            return
        self._versions, self._held, self._kept = versions, None, Kept()
        memory = WeightMemory()
        layer, norm = head.midlayer, self._norm
        qkv, out, gate_up, down = (self._matrix(product, memory) for product in self._products)
        config = head.config
        self._c = CLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            before_mlp=norm(layer.post_attention_layernorm),
            head_norm=self._kept.norm(self._head_norm()),
            heads=CHeads(
                config.num_heads, config.num_kv_heads, config.head_dim, self._spec.scale, 0.0
            ),
            rotation=self._kept.pointer(self._table_PD),
            tap=-1,
        )
        self.input_norms = norm(layer.input_layernorm), norm(layer.hidden_norm)
        self.products = NativeProducts(
            SharpenedLogits(
                NativeMatrix(self.library, head.lm_head.weight, rounded=_FORMAT, memory=memory),
                head.lm_head.weight,
            ),
            NativeMatrix(self.library, head.fc.weight, memory=memory),
        )
        head.serving = ServingProducts(self.products.to_logits, self.products.to_hidden)

    def _matrix(self, product: Product, memory: WeightMemory) -> CMatrix:
        matrix = NativeMatrix(
            self.library,
            product.weight_NK,
            product.bias_N,
            sizes=product.sizes,
            rounded=_FORMAT,
            memory=memory,
        )
        return self._kept.matrix(matrix)

    def _norm(self, module: Any) -> Any:
        return self._kept.norm(Norm(module.weight.detach(), module.eps, "cast_first"))

    def _head_norm(self) -> Norm | None:
        attention, config = self._head.midlayer.self_attn, self._head.config
        if not attention.has_qk_norm:
            return None
        weights = [
            attention.q_norm.weight.detach().expand(config.num_heads, -1),
            attention.k_norm.weight.detach().expand(config.num_kv_heads, -1),
        ]
        return Norm(torch.cat(weights), attention.q_norm.eps, "cast_first")

    def layers_over(self, memory: KVPool, like: Tensor) -> CDecoder:
        """The layer with the memory it writes to."""
        if self._held is not None and self._held[0]() is memory:
            return self._held[1]
        config = self._head.config
        shape = (config.num_kv_heads, config.head_dim)
        pool = memory.for_window(self._spec.window)
        keys, values = pool.hold(self._layer, like, shape, shape)
        (layer,) = layers = (CLayer * 1)(self._c)
        layer.keys, layer.values = self._kept.pointer(keys), self._kept.pointer(values)
        decoder = CDecoder(layers, 1, config.hidden_size, self._norm(self._head.norm), CMatrix())
        self._held = (weakref.ref(memory), decoder)
        return decoder
