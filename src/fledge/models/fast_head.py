"""A head's step in few operations, for serving on a GPU; `Eagle3Head` is its twin.

    pick, norm both halves -> qkv -> rotate, store -> attend -> (rows asked for) out
        --add, norm--> gate, up -> gated -> down --add, norm--> logits

It shares the weights of the head it is made of: matrices that are multiplied together are laid end
to end once, and the head's modules then hold views of them. Weights may be loaded into that head
afterwards, but it must not be moved or cast. A step asks the device nothing, so it can be captured.

Legend: T tokens, R rows whose output is asked for, X rows that hidden states are picked from, D
hidden size, P positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.models.attention import attend_stored
from fledge.models.fast_layers import join
from fledge.models.head import Eagle3Head, HeadOutput, RMSNorm
from fledge.models.native_check import find_native
from fledge.models.native_head import NativeHead
from fledge.ops.attention import AttentionSpec
from fledge.ops.gated import gated
from fledge.ops.head_input import join_inputs
from fledge.ops.kernel_choice import uses_kernels, uses_native
from fledge.ops.kv import KVPool
from fledge.ops.norms import Norm, residual_norm
from fledge.ops.paged import Pass
from fledge.ops.product import Product
from fledge.ops.rope_write import HeadLayout, Rotation, rotate_and_store


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What one step reads and where it leaves its keys and values."""

    packed: Pass
    hidden_XD: Tensor
    rows_T: Tensor
    """Row of the hidden state before each token."""

    rotation_TD: Tensor
    output_rows_R: Tensor | None = None
    """Whose output is asked for; None for all. The others only leave keys and values."""


class FastHead:
    """Steps of one head over paged memory."""

    def __init__(
        self,
        head: Eagle3Head,
        target_embedding: Tensor,
        spec: AttentionSpec,
        *,
        num_positions: int,
        layer: int,
    ) -> None:
        """`layer` is where the head's keys and values are in its memory."""
        self._head, self._spec, self._layer = head, spec, layer
        own = head.own_embedding
        self._embedding = target_embedding if own is None else own
        attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
        self._qkv = join([attention.q_proj, attention.k_proj, attention.v_proj], is_packed=False)
        self._out = _product(attention.o_proj)
        self._gate_up = join([mlp.gate_proj, mlp.up_proj], is_packed=False)
        self._down = _product(mlp.down_proj)
        self._input_norms = _norm(head.midlayer.input_layernorm), _norm(head.midlayer.hidden_norm)
        self._mlp_norm = _norm(head.midlayer.post_attention_layernorm)
        self._final_norm = _norm(head.norm)
        self._table_PD = self._make_table(num_positions)
        if self._embedding.is_cuda:
            # Matrices that were joined have left holes that nothing else fits into.
            torch.cuda.empty_cache()
        library = find_native(head.lm_head.weight, _num_bytes(head))
        self._native: NativeHead | None = None
        if library is not None:
            self._native = NativeHead(
                library,
                head,
                self._embedding,
                spec,
                self._table_PD,
                products=(self._qkv, self._out, self._gate_up, self._down),
                layer=layer,
            )

    @property
    def native(self) -> NativeHead | None:
        """The head on native kernels, where it has them and they are wanted."""
        is_wanted = uses_native(self._head.lm_head.weight, _num_bytes(self._head))
        return self._native if is_wanted else None

    def rotation(self, positions: Tensor) -> Tensor:
        """Cosines and sines of positions of any shape, one row each."""
        rows = self._table_PD.index_select(0, positions.flatten())
        return rows.view(*positions.shape, rows.shape[1])

    def run(self, step: HeadStep, memory: KVPool) -> HeadOutput:
        """One draft step; outputs of the rows asked for, in their order."""
        config, packed = self._head.config, step.packed
        if self._native is not None:
            output = self._native.run(
                packed, step.hidden_XD, step.rows_T, step.output_rows_R, memory
            )
            if output is not None:
                return output
        x_TE, residual = join_inputs(
            packed.token_ids_T,
            self._embedding,
            step.hidden_XD,
            step.rows_T,
            self._input_norms,
            keeps_normed=config.norm_before_residual,
        )
        product_TE = self._qkv(x_TE)
        shape = (config.num_kv_heads, config.head_dim)
        window = self._spec.window
        keys, values = memory.for_window(window).hold(self._layer, product_TE, shape, shape)
        slots_T = packed.view(window).write_slots_T
        query_THD = rotate_and_store(
            product_TE, Rotation(step.rotation_TD), self._layout(), keys, values, slots_T
        )
        attended_THD = attend_stored(packed, memory, self._layer, query_THD, self._spec)
        attended = attended_THD.flatten(1)
        if step.output_rows_R is not None:
            attended = attended.index_select(0, step.output_rows_R)
            residual = residual.index_select(0, step.output_rows_R)
        stream, normed = residual_norm(self._out(attended), residual, before=self._mlp_norm)
        fresh = self._down(gated(self._gate_up(normed), "silu"))
        stream, normed = residual_norm(fresh, stream, before=self._final_norm)
        return HeadOutput(normed if config.norm_output else stream, normed)

    def _layout(self) -> HeadLayout:
        config, attention = self._head.config, self._head.midlayer.self_attn
        norm = None
        if attention.has_qk_norm:
            # Laid out anew each time: newer weights may have been loaded.
            weights = [
                attention.q_norm.weight.detach().expand(config.num_heads, -1),
                attention.k_norm.weight.detach().expand(config.num_kv_heads, -1),
            ]
            norm = Norm(torch.cat(weights), attention.q_norm.eps, "cast_first")
        return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, norm)

    def _make_table(self, num_positions: int) -> Tensor:
        """Cosines and sines of all positions, halves side by side, [P, head size]."""
        attention, weight = self._head.midlayer.self_attn, self._head.lm_head.weight
        positions_P = torch.arange(num_positions, device=weight.device).float()
        angles = positions_P[:, None] * attention.frequencies(weight.device)[None, :]
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention.rope_scale
        return table.to(weight.dtype)


def has_fast_steps(head: Eagle3Head) -> bool:
    """Whether the kernels are for a head like this, where it is; not in float64.

    On a CPU there are native ones for a large head, in float32.
    """
    weight = head.lm_head.weight
    is_known = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    is_wanted = uses_kernels(weight) or find_native(weight, _num_bytes(head)) is not None
    return is_known and is_wanted and head.config.head_dim % 2 == 0


def _num_bytes(head: Eagle3Head) -> int:
    return sum(p.numel() * p.element_size() for p in head.parameters())


def _norm(module: RMSNorm) -> Norm:
    return Norm(module.weight.detach(), module.eps, "cast_first")


def _product(module: torch.nn.Linear) -> Product:
    bias = None if module.bias is None else module.bias.detach()
    return Product(module.weight.detach(), bias, is_packed=False)
