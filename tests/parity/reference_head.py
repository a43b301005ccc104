"""An EAGLE-3 head written out from its description, for comparison with the engine's.

It reads the public files (config.json, model.safetensors), recomputes the whole context for every
path it looks at, and keeps no cache. Positions count the head's entries from 0, as EAGLE's own code
does; the engine counts tokens. Rotation sees differences only, so both must agree.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Path_ = tuple[int, ...]
"""Drafted tokens below the root; the root itself is the empty path."""


@dataclass(frozen=True)
class Context:
    """What is committed: tokens t0..tn, and the target's features of all but the newest."""

    token_ids: list[int]
    features: Tensor

    def __post_init__(self) -> None:
        assert len(self.token_ids) == self.features.shape[0] + 1


class ReferenceHead:
    def __init__(self, directory: Path, embedding: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")
        self.embedding = embedding

    def rms(self, hidden: Tensor, name: str) -> Tensor:
        scale = (hidden**2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return hidden / scale.sqrt() * self.tensors[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.tensors[name + ".weight"].T
        return out + self.tensors.get(name + ".bias", torch.zeros(out.shape[-1]))

    def fuse(self, features: Tensor) -> Tensor:
        if self.config["norm_before_fc"]:
            features = self.rms(features, "input_norm")
        if self.config["fc_norm"]:
            size = self.config["target_hidden_size"]
            taps = [features[:, i : i + size] for i in range(0, features.shape[1], size)]
            features = torch.cat([self.rms(t, f"fc_norm.{i}") for i, t in enumerate(taps)], dim=1)
        return self.linear(features, "fc")

    def rope(self, states: Tensor) -> Tensor:
        """[n, heads, d] at positions 0..n-1, pairs (i, i + d/2)."""
        half = states.shape[-1] // 2
        inverse = torch.tensor(
            [self.config["rope_theta"] ** (-2 * i / states.shape[-1]) for i in range(half)]
        )
        angles = (torch.arange(states.shape[0])[:, None] * inverse)[:, None, :]
        a, b = states[..., :half], states[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
        )

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention over all entries, one query head at a time."""
        num_heads, head_dim = self.config["num_attention_heads"], self.config["head_dim"]
        group = num_heads // self.config["num_key_value_heads"]
        query, keys, values = (
            self.linear(x, f"midlayer.self_attn.{name}_proj").unflatten(1, (-1, head_dim))
            for name in "qkv"
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            query = self.rms(query, "midlayer.self_attn.q_norm")
            keys = self.rms(keys, "midlayer.self_attn.k_norm")
        query, keys = self.rope(query), self.rope(keys)
        steps = torch.arange(x.shape[0])
        distance = steps[:, None] - steps[None, :]
        seen = distance >= 0
        if self.config.get("sliding_window"):
            seen &= distance < self.config["sliding_window"]
        heads = []
        for head in range(num_heads):
            scores = query[:, head] @ keys[:, head // group].T / head_dim**0.5
            probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            heads.append(probs @ values[:, head // group])
        return self.linear(torch.cat(heads, dim=1), "midlayer.self_attn.o_proj")

    def forward(self, token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Feedback and log-probabilities of every entry."""
        embeds = self.rms(self.embedding[token_ids], "midlayer.input_layernorm")
        normed = self.rms(hidden, "midlayer.hidden_norm")
        residual = normed if self.config["norm_before_residual"] else hidden
        out = residual + self.attend(torch.cat([embeds, normed], dim=1))
        inner = self.rms(out, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(inner, "midlayer.mlp.gate_proj"))
        up = self.linear(inner, "midlayer.mlp.up_proj")
        out = out + self.linear(gate * up, "midlayer.mlp.down_proj")
        final = self.rms(out, "norm")
        logprobs = self.linear(final, "lm_head").log_softmax(-1)
        return (final if self.config["norm_output"] else out), logprobs

    def candidates(self, context: Context, depth: int, width: int) -> dict[Path_, float]:
        """Cumulative log-probability of every path that EAGLE's tree expansion scores."""
        fused = self.fuse(context.features)
        feedback: dict[Path_, Tensor] = {}

        def best_children(path: Path_) -> list[tuple[int, float]]:
            drafted = [feedback[path[:i]] for i in range(len(path))]
            hidden = torch.stack([*fused, *drafted])
            out, logprobs = self.forward([*context.token_ids[1:], *path], hidden)
            feedback[path] = out[-1]
            top = logprobs[-1].topk(min(width, logprobs.shape[-1]))
            return [
                (index + int(self.tensors["d2t"][index]), value)
                for index, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]

        scores: dict[Path_, float] = {(): 0.0}
        frontier: list[Path_] = [()]
        for _ in range(depth):
            level = {
                (*path, token): scores[path] + logprob
                for path in frontier
                for token, logprob in best_children(path)
            }
            scores |= level
            frontier = sorted(level, key=lambda path: -level[path])[:width]
        del scores[()]
        return scores


def true_features(model: Any, token_ids: list[int], taps: tuple[int, ...]) -> Tensor:
    """Residual streams of transformers' own pass after the given numbers of completed layers."""
    before_norm: list[Tensor] = []
    hook = model.get_decoder().norm.register_forward_pre_hook(
        lambda module, args: before_norm.append(args[0])
    )
    try:
        with torch.no_grad():
            output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    # transformers lists the last layer's output after the final norm; the head wants it before.
    streams = [*output.hidden_states[:-1], before_norm[0]]
    return torch.cat([streams[tap][0] for tap in taps], dim=-1)
