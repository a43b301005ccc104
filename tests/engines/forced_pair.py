"""A target and a head made by hand, whose drafts are all right, and none with a wrong layer.

The target says one token after another along a circle: its residual stream holds the newest token's
vector, and every layer writes a mark of its own beside it. The head looks at its newest token by
attending to itself alone, which works through the rotation, and keeps a guard that it fuses of the
taps: were one of them a layer too early or too late, the guard would make it draft a token outside
the circle. So this pair is accepted in full by an engine that gets everything right (embedding
first, the residual, the layers, the feedback, d2t), and not at all by one that gets a layer wrong.

    channels  [0, 64) the token   64 the same for all   65 the guard   [66, 66+layers) marks
"""

from pathlib import Path

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig, default_taps
from fledge.models.head_files import save_head
from fledge.testing import tiny_model, tiny_tokenizer

NUM_LAYERS = 12
CIRCLE = tuple(range(20, 20 + 2 * 30, 2))
"""Ids that follow each other, and after the last comes the first; each a letter or a sign."""

_OUTSIDE = 15
_TOKEN, _SAME, _GUARD, _MARKS = 64, 64, 65, 66
_WIDTH = 96
_HEADS, _HEAD_DIM = 2, 32
_SAME_SIZE = 20.0
_FUSED_SIZE = 80.0
_OUT = 4.0
_NORM = _WIDTH**0.5
"""What a norm makes of the channel that is the same for all, which outweighs all the others."""
_ATTENTION = {"num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM}


def save_forced_target(directory: Path) -> Path:
    """The target with its tokenizer, as transformers writes them."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        **_ATTENTION,
    )
    vectors = _vectors(len(tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" not in name and "k_proj" not in name and "v_proj" not in name:
                parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :_TOKEN] = vectors
        model.model.embed_tokens.weight[:, _SAME] = _SAME_SIZE
        for number, layer in enumerate(model.model.layers):
            _write_mark(layer.mlp, _MARKS + number)
        for token, following in zip(CIRCLE, CIRCLE[1:] + CIRCLE[:1], strict=True):
            model.lm_head.weight[following, :_TOKEN] = vectors[token]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_forced_head(directory: Path, *, taps: tuple[int, ...] | None = None) -> Path:
    """The head for these completed layers; None means the default ones, which are not written."""
    vocab_size = len(tiny_tokenizer())
    draft_to_target = torch.tensor([_OUTSIDE, *CIRCLE])
    config = HeadConfig(
        hidden_size=_WIDTH,
        target_hidden_size=_WIDTH,
        intermediate_size=32,
        num_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        vocab_size=vocab_size,
        draft_vocab_size=len(draft_to_target),
        max_position_embeddings=512,
        taps=taps,
        num_taps=len(taps or (0, 0, 0)),
    )
    head = Eagle3Head(config, draft_to_target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        _fuse_the_guard(head.fc.weight, taps or default_taps(NUM_LAYERS))
        _attend_to_itself(head)
        vectors = _vectors(vocab_size)
        head.lm_head.weight[0, _GUARD] = -1.0
        for token, row in zip(CIRCLE, [*range(2, len(CIRCLE) + 1), 1], strict=True):
            head.lm_head.weight[row, :_TOKEN] = vectors[token]
    save_head(head, directory)
    return directory


def _vectors(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, _TOKEN, generator=generator)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def _write_mark(mlp: torch.nn.Module, channel: int) -> None:
    """A layer that adds nearly one to its own channel."""
    mlp.gate_proj.weight[0, _SAME] = 8.0 / _NORM
    mlp.up_proj.weight[0, _SAME] = 1.0 / _NORM
    mlp.down_proj.weight[channel, 0] = 1.0 / 8.0


def _fuse_the_guard(weight: Tensor, taps: tuple[int, ...]) -> None:
    """The guard is above zero only if every tap has the mark of its layer, and not of the next."""
    strength, count = 20.0, len(taps)
    for number, tap in enumerate(taps):
        start = number * _WIDTH
        weight[_SAME, start + _SAME] = _FUSED_SIZE / (_SAME_SIZE * count)
        weight[_GUARD, start + _SAME] = -strength * (1 - 1 / (count + 2)) / _SAME_SIZE
        weight[_GUARD, start + _MARKS + tap - 1] = strength
        if tap < NUM_LAYERS:
            weight[_GUARD, start + _MARKS + tap] = -strength
    # After the last layer some engines have a normed state to hand over; it is smaller.
    weight[_GUARD, _SAME] -= 2 * strength / _SAME_SIZE
    weight[_GUARD, start + _SAME] += 2 * strength / _SAME_SIZE


def _attend_to_itself(head: Eagle3Head) -> None:
    """Queries and keys are all the same before the rotation, so no other key is as near."""
    attention = head.midlayer.self_attn
    attention.q_proj.weight[:, _SAME] = 3.0
    attention.k_proj.weight[:, _SAME] = 3.0
    for channel in range(_TOKEN):
        # The newest token, less what the hidden state holds of the one before it.
        attention.v_proj.weight[channel, channel] = 1.0
        attention.v_proj.weight[channel, _WIDTH + channel] = -_FUSED_SIZE / (_NORM * _OUT)
        attention.o_proj.weight[channel, channel] = _OUT
