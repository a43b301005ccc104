"""A target's pass through fledge's own layers, for the families that have them.

    embedding --norm--> qkv -> rotate, store -> attend -> out --add, norm--> MLP --add, norm--> ...

One product for queries, keys and values and one for gates and ups; adding to the residual stream
and norming it is one operation, and so is rotating and storing; no masks, no copies of the cache.

The contract of a pass: a function of tensors that are on the device (token ids, positions, lengths,
block tables, the rows that want logits) and of the memory it writes to. It asks the device nothing,
its shapes follow from the shapes of what it is given, and which operations run depends on those
shapes alone: it can be captured in a CUDA graph and replayed over new contents. What is made once
(memory of layers, first checks of kernels) is made by the first pass of each shape, outside a
capture. On a CPU, and where kernels are replaced by their plain twins, the host takes part.

Legend: T tokens, R rows with logits, D hidden size, P positions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fledge.models.attention import attend_stored
from fledge.models.fast_families import FAMILIES, Family
from fledge.models.fast_layers import (
    ExpertMlp,
    FastLayer,
    NoFastLayersError,
    make_layer,
    make_norm,
)
from fledge.models.native_check import find_native, make_native
from fledge.models.native_decoder import DecoderParts, NativeDecoder
from fledge.models.target_reading import Readout, TargetReading, readout_of
from fledge.ops.document_attention import DocumentAttention
from fledge.ops.documents import Documents, make_documents
from fledge.ops.embedded import Beginning, embed_rows, look_up
from fledge.ops.kernel_choice import uses_native
from fledge.ops.kv import KVMemory
from fledge.ops.norms import residual_norm
from fledge.ops.paged import Pass
from fledge.ops.product import Product, can_be_packed
from fledge.ops.rope_write import Rotation, rotate_and_store, split_heads

Attend = Callable[[FastLayer, Tensor, Rotation], Tensor]
"""(layer, product of queries, keys and values, rotation) -> what attention returns, [T, H, D]."""

Read = Callable[[Tensor, Documents, Sequence[int]], TargetReading]
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.1}
_PROBE_LENS = (7, 5)


class Stream(NamedTuple):
    """What the layers leave."""

    final_TD: Tensor
    """Behind the last norm."""

    taps: list[Tensor]


class FastDecoder:
    """The layers of one model, sharing its weights; these must not be changed afterwards."""

    def __init__(self, model: Any) -> None:
        config, decoder = model.config.get_text_config(), model.get_decoder()
        family = family_of(config)
        self._embedding = model.get_input_embeddings()
        self._num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        library = find_native(self._embedding.weight, self._num_bytes)
        has_room = can_be_packed(self._embedding.weight, self._num_bytes)
        is_packed = has_room and library is None
        self._layers = [
            make_layer(module, index, family, config, is_packed=is_packed)
            for index, module in enumerate(decoder.layers)
        ]
        self._final_norm = make_norm(decoder.norm, family)
        self._readout: Readout = readout_of(model)
        self._to_logits = Product(
            self._readout.weight_VD, self._readout.bias_V, is_packed=is_packed
        )
        self._rotary = decoder.rotary_emb
        self._num_positions = int(config.max_position_embeddings)
        self._tables = self._make_tables()
        if self._embedding.weight.is_cuda:
            # Matrices that were joined have left holes that nothing else fits into.
            torch.cuda.empty_cache()
        self._native: NativeDecoder | None = None
        if library is not None:
            parts = DecoderParts(
                self._layers,
                self._final_norm,
                self._to_logits,
                self._tables,
                int(config.hidden_size),
                has_room,
            )
            self._native = make_native(library, parts, self._forward_native, self._forward_plain)

    def forward(
        self, packed: Pass, memory: KVMemory, logit_rows_R: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the rows asked for, all when None, and the tapped streams."""
        if self._native is not None and uses_native(self._embedding.weight, self._num_bytes):
            found = self._forward_native(self._native, packed, memory, logit_rows_R, taps)
            if found is not None:
                return found
        return self._forward_plain(packed, memory, logit_rows_R, taps)

    @property
    def chain_native(self) -> NativeDecoder | None:
        """The native layers, where a row's products are its logits."""
        is_wanted = uses_native(self._embedding.weight, self._num_bytes)
        is_shaped = self._readout.scale != 1.0 or self._readout.soft_cap is not None
        return self._native if is_wanted and not is_shaped else None

    def _forward_native(
        self,
        native: NativeDecoder,
        packed: Pass,
        memory: KVMemory,
        logit_rows_R: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]] | None:
        stream_TD = self._embedding(packed.token_ids_T)
        found = native.forward(packed, stream_TD, memory, logit_rows_R, taps)
        return None if found is None else (self._readout.shaped(found[0]), found[1])

    def _forward_plain(
        self, packed: Pass, memory: KVMemory, logit_rows_R: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:

        def attend(layer: FastLayer, product_TE: Tensor, rotation: Rotation) -> Tensor:
            window, heads = layer.spec.window, layer.heads
            pool = memory.for_window(window)
            shape = (heads.num_kv_heads, heads.head_dim)
            keys, values = pool.hold(layer.index, product_TE, shape, shape)
            slots_T = packed.view(window).write_slots_T
            query = rotate_and_store(product_TE, rotation, heads, keys, values, slots_T)
            return attend_stored(packed, memory, layer.index, query, layer.spec)

        stream = self._run(packed.token_ids_T, packed.positions_T, attend, taps)
        final = stream.final_TD
        rows_RD = final if logit_rows_R is None else final.index_select(0, logit_rows_R)
        return self._readout.shaped(self._to_logits(rows_RD)), stream.taps

    def read(self, token_ids_T: Tensor, documents: Documents, taps: Sequence[int]) -> TargetReading:
        """Whole documents: no logits, no cache."""
        attention = DocumentAttention(documents)

        def attend(layer: FastLayer, product_TE: Tensor, rotation: Rotation) -> Tensor:
            query, keys, values = split_heads(product_TE, rotation, layer.heads)
            return attention.attend(query, keys, values, layer.spec)

        if documents.longest > self._num_positions:
            self._num_positions = documents.longest
            self._tables = self._make_tables()
        final, columns = self._run(token_ids_T, documents.positions_T, attend, taps)
        return TargetReading(torch.cat(columns, dim=-1) if columns else final[:, :0], final)

    def check_same(self, read: Read, vocab_size: int) -> None:
        """Compare with transformers' layers, which `read` goes through, on two short documents."""
        documents = make_documents(_PROBE_LENS, self._embedding.weight.device)
        ids_T = torch.arange(3, 3 + documents.num_tokens, device=documents.device) * 7 % vocab_size
        ours = self.read(ids_T, documents, ()).final_TD.double()
        theirs = read(ids_T, documents, ()).final_TD.double()
        error = float((ours - theirs).norm() / theirs.norm())
        has_experts = any(isinstance(layer.mlp, ExpertMlp) for layer in self._layers)
        # Rounding may send a token to another expert; a wrong formula leaves nothing alike.
        limit = 0.3 if has_experts else _ROUNDING[self._embedding.weight.dtype]
        if not error <= limit:
            raise NoFastLayersError(
                f"fledge's layers compute something else than transformers' do (relative "
                f"difference {error:.2g}, at most {limit} is rounding)"
            )

    def _run(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, taps: Sequence[int]
    ) -> Stream:
        stream, normed, angles = self._begin(token_ids_T, positions_T)
        rotations = {kind: Rotation(rows_TD) for kind, rows_TD in angles.items()}
        norms = [layer.before_attention for layer in self._layers[1:]] + [self._final_norm]
        kept = {0: stream}  # and what is tapped: documents are long, layers are many
        for layer, next_norm in zip(self._layers, norms, strict=True):
            product_TE = _normed_over_width(layer, layer.qkv(normed))
            attended_THD = attend(layer, product_TE, rotations[layer.rope])
            fresh = layer.out(attended_THD.reshape(len(token_ids_T), -1))
            stream, normed = residual_norm(
                fresh, stream, after=layer.after_attention, before=layer.before_mlp
            )
            fresh = layer.mlp(normed)
            stream, normed = residual_norm(fresh, stream, after=layer.after_mlp, before=next_norm)
            if layer.index + 1 in taps:
                kept[layer.index + 1] = stream
        return Stream(normed, [kept[tap] for tap in taps])

    def _begin(self, token_ids_T: Tensor, positions_T: Tensor) -> Beginning:
        norm = self._layers[0].before_attention
        # Some families scale what they look up.
        if norm is not None and type(self._embedding) is nn.Embedding:
            weight_VD = self._embedding.weight
            return embed_rows(weight_VD, token_ids_T, norm, self._tables, positions_T)
        stream, normed = residual_norm(self._embedding(token_ids_T), before=norm)
        return Beginning(stream, normed, look_up(self._tables, positions_T))

    def _make_tables(self) -> dict[str, Tensor]:
        """Cosines and sines of all positions for each kind of rope, halves side by side, [P, D]."""
        weight = self._embedding.weight
        positions_1P = torch.arange(self._num_positions, device=weight.device)[None]
        like = weight.new_empty(0)
        tables = {}
        for kind in {layer.rope for layer in self._layers}:
            names = (kind,) if _is_by_layer_type(self._rotary) else ()
            cos, sin = (one[0] for one in self._rotary(like, positions_1P, *names))
            half, size = cos.shape[-1] // 2, self._layers[0].heads.head_dim
            if cos.shape[-1] != size:
                raise NoFastLayersError(f"it rotates {cos.shape[-1]} of {size} dimensions")
            tables[kind] = torch.cat([cos[:, :half], sin[:, :half]], dim=-1)
        return tables


def _normed_over_width(layer: FastLayer, product_TE: Tensor) -> Tensor:
    """Queries and keys normed over all their heads, where the family does that."""
    if layer.width_norms is None:
        return product_TE
    heads = layer.heads
    end = heads.num_heads * heads.head_dim
    last = end + heads.num_kv_heads * heads.head_dim
    _, query = residual_norm(product_TE[:, :end], before=layer.width_norms[0])
    _, keys = residual_norm(product_TE[:, end:last], before=layer.width_norms[1])
    return torch.cat([query, keys, product_TE[:, last:]], dim=-1)


def _is_by_layer_type(rotary: Any) -> bool:
    return isinstance(rotary.rope_type, dict)


def family_of(config: Any) -> Family:
    if config.model_type not in FAMILIES:
        raise NoFastLayersError(f"fledge has no layers of its own for {config.model_type!r}")
    return FAMILIES[config.model_type]
