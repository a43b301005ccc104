"""Decoder layers of fledge's own, made of the weights that transformers has loaded.

Queries, keys and values are one product, gates and ups another: their matrices are laid end to end
once, and transformers' modules then hold views of them, so that nothing is there twice and the
model of transformers goes on working. (Only what a CPU packs for itself is a second copy.)

Legend: T tokens, D hidden size, N outputs, K inputs of a product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fledge.contracts.errors import CapacityError
from fledge.models.fast_families import NORM_NAMES, Family
from fledge.ops.attention import AttentionSpec
from fledge.ops.experts import Experts, apply_experts
from fledge.ops.gated import Activation, gated
from fledge.ops.norms import Norm
from fledge.ops.product import Product
from fledge.ops.rope_write import HeadLayout
from fledge.store.capacity import format_bytes

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class NoFastLayersError(Exception):
    """This model is not what its family usually is; the message says in what."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: Product
    down: Product
    activation: Activation

    def __call__(self, rows_TD: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(rows_TD), self.activation))


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    experts: Experts

    def __call__(self, rows_TD: Tensor) -> Tensor:
        return apply_experts(self.experts, rows_TD)


@dataclass(frozen=True, slots=True)
class FastLayer:
    """What a layer is made of; the decoder knows the order in which it is applied."""

    index: int
    qkv: Product
    heads: HeadLayout
    width_norms: tuple[Norm, Norm] | None
    """Of queries and keys over all their heads, before they are cut into heads."""

    rope: str
    """Which of the target's rotations."""

    spec: AttentionSpec
    out: Product
    mlp: DenseMlp | ExpertMlp
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


def make_layer(
    module: Any, index: int, family: Family, config: Any, *, is_packed: bool
) -> FastLayer:
    """One layer from transformers' module, whose matrices become views of the joined ones."""
    attention = module.self_attn
    norms = [
        None if name is None else make_norm(getattr(module, name), family)
        for name in NORM_NAMES[family.place]
    ]
    head_norm, width_norms = _query_norms(attention, family, config)
    layer_types = getattr(config, "layer_types", None)
    return FastLayer(
        index=index,
        qkv=join([attention.q_proj, attention.k_proj, attention.v_proj], is_packed=is_packed),
        heads=HeadLayout(
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            int(attention.head_dim),
            head_norm,
        ),
        width_norms=width_norms,
        rope=layer_types[index] if layer_types else "",
        spec=_spec(attention, config),
        out=_product(attention.o_proj, is_packed=is_packed),
        mlp=_make_mlp(module.mlp, config, is_packed=is_packed),
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
    )  # fmt: skip


def make_norm(module: Any, family: Family) -> Norm:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(module.weight.detach(), float(eps), family.norm)


def join(modules: list[nn.Linear], *, is_packed: bool) -> Product:
    """One product of several; their weights become views of its matrix."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise NoFastLayersError(f"its matrices are held by {type(module).__name__}")
    weight_NK = _joined([module.weight for module in modules])
    biases = [module.bias for module in modules]
    bias_N = None if biases[0] is None else _joined(biases)
    sizes = [module.out_features for module in modules]
    return Product(weight_NK, bias_N, is_packed=is_packed, sizes=sizes)


def _joined(parameters: list[Any]) -> Tensor:
    first = parameters[0].detach()
    if _lie_together(parameters):
        # Joined before, by another decoder of the same model.
        size = sum(len(one) for one in parameters)
        whole: Tensor = first.as_strided((size, *first.shape[1:]), first.stride())
        return whole
    try:
        whole = torch.cat([one.detach() for one in parameters])
    except torch.OutOfMemoryError as error:
        num_bytes = sum(one.numel() * one.element_size() for one in parameters)
        raise CapacityError(
            f"{first.device} ran out of memory for matrices that are laid end to end, which takes "
            f"{format_bytes(num_bytes)} more for a moment; end what else uses the device, use a "
            "smaller target, or go without a head."
        ) from error
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + len(parameter)]
        start += len(parameter)
    return whole


def _lie_together(parameters: list[Any]) -> bool:
    """Whether each begins where the one before it ends, in the same memory."""
    starts = [one.storage_offset() for one in parameters]
    ends = [start + one.numel() for start, one in zip(starts, parameters, strict=True)]
    return (
        len({one.untyped_storage().data_ptr() for one in parameters}) == 1
        and all(one.is_contiguous() for one in parameters)
        and starts[1:] == ends[:-1]
    )


def _product(module: nn.Linear, *, is_packed: bool) -> Product:
    bias = None if module.bias is None else module.bias.detach()
    return Product(module.weight.detach(), bias, is_packed=is_packed)


def _query_norms(
    attention: Any, family: Family, config: Any
) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    if family.qk_norm == "none":
        return None, None
    query, keys = make_norm(attention.q_norm, family), make_norm(attention.k_norm, family)
    if family.qk_norm == "width":
        return None, (query, keys)
    weights = [
        query.weight_D.expand(config.num_attention_heads, -1),
        keys.weight_D.expand(config.num_key_value_heads, -1),
    ]
    return Norm(torch.cat(weights), query.eps, family.norm), None


def _spec(attention: Any, config: Any) -> AttentionSpec:
    """As transformers' modules hand it to attention."""
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    # Gemma 3 has the setting and does not use it.
    has_cap = config.model_type == "gemma2"
    return AttentionSpec(
        scale=float(attention.scaling),
        window=window,
        soft_cap=attention.attn_logit_softcapping if has_cap else None,
    )


def _make_mlp(module: Any, config: Any, *, is_packed: bool) -> DenseMlp | ExpertMlp:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise NoFastLayersError(f"its activation is {name}")
    activation = _ACTIVATIONS[name]
    if hasattr(module, "experts"):
        return ExpertMlp(
            Experts(
                router_XD=module.gate.weight.detach(),
                gate_up_XJD=module.experts.gate_up_proj.detach(),
                down_XDI=module.experts.down_proj.detach(),
                num_chosen=int(module.gate.top_k),
                is_normalised=bool(module.gate.norm_topk_prob),
                activation=activation,
            )
        )
    return DenseMlp(
        gate_up=join([module.gate_proj, module.up_proj], is_packed=is_packed),
        down=_product(module.down_proj, is_packed=is_packed),
        activation=activation,
    )
