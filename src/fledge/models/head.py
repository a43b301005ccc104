"""The EAGLE-3 head: one class for training and for serving.

    taps [T, 3D] --fc--> hidden g            embedding of the next token e
                            |                          |
                       hidden_norm               input_layernorm
                            +----------- concat -------+      (embedding first, width 2D)
                                            |
                     q, k, v -> attention -> o_proj
                            |
           residual g  ->  add -> post_attention_layernorm -> SwiGLU -> add = g'
                                                                           |
                      logits = lm_head(norm(g')),  fed back to the next step: g'

`fc` sees true target features only; what the head itself produced is already of width D. The class
holds no mask and no cache: `attend` is passed in, so training and serving share every line here.

Legend: T tokens, D hidden size, F = taps x target hidden size, H heads, V draft vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fledge.models.head_config import HeadConfig
from fledge.models.turned_rows import TurnedRows, turned
from fledge.ops.rope import default_frequencies, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [T,H,d], keys [T,G,d], values [T,G,d]) -> [T,H,d]; stores keys and values if it wants."""


class ServingProducts(NamedTuple):
    """Products that take the place of a head's modules where nothing is trained."""

    to_logits: Callable[[Tensor], Tensor]
    to_hidden: Callable[[Tensor], Tensor]


class HeadOutput(NamedTuple):
    feedback_TD: Tensor
    """Input hidden state of the next draft step."""

    normed_TD: Tensor
    """What the logits are made of."""


class AttentionInput(NamedTuple):
    """What a layer hands to attention, and what it adds the outcome to."""

    residual_TD: Tensor
    query_THD: Tensor
    keys_TGD: Tensor
    values_TGD: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


class HeadAttention(nn.Module):
    """Projections and rotation; reads embedding and hidden state side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias
        )
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        frequencies, self.rope_scale = _rope(config)
        # Neither a parameter nor a buffer: casting the head to bfloat16 must not touch them.
        self._frequencies = {frequencies.device: frequencies}

    def frequencies(self, device: torch.device) -> Tensor:
        """Rotation frequencies, copied to a device once."""
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        return self._frequencies[device]

    def project(self, x_TE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values, the first two rotated to their positions."""
        num_tokens = x_TE.shape[0]
        frequencies = self.frequencies(positions_T.device)
        query = self.q_proj(x_TE).view(num_tokens, -1, self.head_dim)
        keys = self.k_proj(x_TE).view(num_tokens, -1, self.head_dim)
        values = self.v_proj(x_TE).view(num_tokens, -1, self.head_dim)
        if self.has_qk_norm:
            query, keys = self.q_norm(query), self.k_norm(keys)
        query = rotate(query, positions_T, frequencies, self.rope_scale)
        keys = rotate(keys, positions_T, frequencies, self.rope_scale)
        return query, keys, values


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class HeadLayer(nn.Module):
    """The one decoder layer; names are those of the public checkpoints."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = HeadAttention(config)
        self.mlp = HeadMLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(
        self, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        residual_TD, *projected = self.before_attention(embeds_TD, hidden_TD, positions_T)
        return self.after_attention(residual_TD, attend(*projected))

    def before_attention(
        self, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor
    ) -> AttentionInput:
        normed_TD = self.hidden_norm(hidden_TD)
        residual_TD = normed_TD if self.norm_before_residual else hidden_TD
        x_TE = torch.cat([self.input_layernorm(embeds_TD), normed_TD], dim=-1)
        return AttentionInput(residual_TD, *self.self_attn.project(x_TE, positions_T))

    def after_attention(self, residual_TD: Tensor, attended_THD: Tensor) -> Tensor:
        hidden_TD = residual_TD + self.self_attn.o_proj(attended_THD.flatten(1))
        out: Tensor = hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))
        return out


class Eagle3Head(nn.Module):
    """Fused taps, one decoder layer, a reduced vocabulary."""

    draft_to_target_V: Tensor
    """Target token id of each draft token id."""

    own_embedding: Tensor | None
    """Embedding of a head that brings one; nearly all share the target's."""

    common_V: Tensor | None
    """Drafted tokens that are said often, where the head knows: a CPU drafts these alone."""

    def __init__(
        self,
        config: HeadConfig,
        draft_to_target_V: Tensor | None = None,
        own_embedding: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.serving: ServingProducts | None = None
        fused = config.num_taps * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_taps)
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, config.rms_norm_eps)
        self.midlayer = HeadLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Linear | TurnedRows = (
            TurnedRows(config.hidden_size)
            if config.turned_rows
            else nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        )
        if draft_to_target_V is None:
            draft_to_target_V = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_to_target_V", draft_to_target_V, persistent=False)
        self.register_buffer("own_embedding", own_embedding, persistent=False)
        self.register_buffer("common_V", None, persistent=False)

    def with_own_rows(self, target_rows_VD: Tensor) -> "Eagle3Head":
        """An ordinary head of a head with turned rows; the rest is shared, not copied."""
        assert isinstance(self.lm_head, TurnedRows)
        turn_DD = self.lm_head.turn.detach()
        rows_VD = turned(target_rows_VD.to(turn_DD.device), turn_DD.float()).to(turn_DD.dtype)
        whole = self._with_rows(rows_VD, self.draft_to_target_V)
        whole.common_V = self.common_V
        return whole

    def of_common_tokens(self) -> "Eagle3Head":
        """An ordinary head that drafts nothing but common tokens; the rest is shared."""
        assert self.common_V is not None
        rows_VD = self.lm_head.weight.detach()[self.common_V]
        return self._with_rows(rows_VD, self.draft_to_target_V[self.common_V])

    def _with_rows(self, rows_VD: Tensor, draft_to_target_V: Tensor) -> "Eagle3Head":
        weights = {
            name: one for name, one in self.state_dict().items() if not name.startswith("lm_head")
        }
        with torch.device("meta"):
            other = Eagle3Head(
                dataclasses.replace(self.config, turned_rows=False, draft_vocab_size=len(rows_VD))
            )
        other.load_state_dict({**weights, "lm_head.weight": rows_VD}, assign=True)
        other.draft_to_target_V = draft_to_target_V
        other.own_embedding = self.own_embedding
        return other.train(self.training)

    def embed(self, token_ids_T: Tensor, target_embedding: Tensor) -> Tensor:
        """Embeddings of target tokens, from the target's matrix unless the head has its own."""
        matrix = target_embedding if self.own_embedding is None else self.own_embedding
        return F.embedding(token_ids_T, matrix)

    def fuse(self, features_TF: Tensor) -> Tensor:
        """Tapped target features to the head's width."""
        fused: Tensor = self.fc(self.fusion_input(features_TF))
        return fused

    def fusion_input(self, features_TF: Tensor) -> Tensor:
        """Tapped target features as `fc` reads them."""
        if self.config.norm_before_fc:
            features_TF = self.input_norm(features_TF)
        if self.config.fc_norm:
            taps = torch.split(features_TF, self.config.target_hidden_size, dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            features_TF = torch.cat(normed, dim=-1)
        return features_TF

    def forward(
        self, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> HeadOutput:
        """One draft step for T tokens: their embeddings, and the hidden state before each."""
        return self.finish(self.midlayer(embeds_TD, hidden_TD, positions_T, attend))

    def finish(self, out_TD: Tensor) -> HeadOutput:
        """What a step gives, of the layer's output."""
        normed_TD = self.norm(out_TD)
        return HeadOutput(normed_TD if self.config.norm_output else out_TD, normed_TD)

    def logits(self, normed_TD: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        if self.serving is not None and not torch.is_grad_enabled():
            return self.serving.to_logits(normed_TD)
        out: Tensor = self.lm_head(normed_TD)
        return out


def _rope(config: HeadConfig) -> tuple[Tensor, float]:
    """Rotation frequencies and the scale some rope types put on cosine and sine."""
    scaling = config.rope_scaling or {}
    rope_type = scaling.get("rope_type", "default")
    if rope_type == "default":
        return default_frequencies(config.head_dim, config.rope_theta), 1.0
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**scaling, "rope_theta": config.rope_theta},
    )
    # A head being loaded is laid out on the meta device first; these numbers are wanted for real.
    with torch.device("cpu"):
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](llama, torch.device("cpu"))
    return frequencies, float(scale)
