"""`--verify`: the export read back by its engine's rules must be the head that was exported."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fledge.contracts.errors import MismatchError
from fledge.interop.engine_view import EngineView
from fledge.interop.taps import known_taps
from fledge.interop.target_facts import TargetFacts
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig, default_taps

Reader = Callable[[Path, TargetFacts | None, HeadConfig], EngineView]

_NUM_TOKENS, _NUM_STEPS = 6, 3


def verify_export(
    head: Eagle3Head, directory: Path, target: TargetFacts | None, read: Reader
) -> tuple[str, ...]:
    """Compare what the engine would run with what was exported; returns what was found equal."""
    view = read(directory, target, head.config)
    ours, theirs = known_taps(head.config, target), view.taps
    if theirs is None and target is not None:
        theirs = default_taps(target.num_layers)
    if ours != theirs:
        raise MismatchError(
            f"{directory} would be given the states after {theirs} completed layers; the head "
            f"reads {ours}. Nothing was kept."
        )
    if not torch.equal(head.draft_to_target_V.cpu(), view.head.draft_to_target_V):
        raise MismatchError(f"{directory} maps draft tokens otherwise than the head. Report this.")
    window = head.config.sliding_window
    if not view.takes_window_option and view.head.config.sliding_window != window:
        raise MismatchError(
            f"{directory} is read with a window of {view.head.config.sliding_window}; the head "
            f"has {window}. Report this."
        )
    logits = [draft_logits(one, window=window) for one in (head, view.head)]
    deviation = float((logits[0] - logits[1]).abs().max())
    if deviation > 0:
        raise MismatchError(
            f"{directory} gives other draft logits than the head, by up to {deviation:.3g}. "
            "Report this."
        )
    layers = "the engine's default" if ours is None else ", ".join(map(str, ours))
    return (
        f"target layers read: {layers}",
        f"draft vocabulary: {len(head.draft_to_target_V)} of {head.config.vocab_size} tokens",
        f"draft logits of {_NUM_TOKENS} tokens over {_NUM_STEPS} steps: equal",
    )


@torch.no_grad()
def draft_logits(head: Eagle3Head, *, window: int | None) -> Tensor:
    """Logits of a fixed random batch, fed back for some steps: every weight and flag matters."""
    config = head.config
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        drawn = torch.randn(_NUM_TOKENS, width, generator=generator)
        return drawn.to(head.fc.weight.dtype)

    features = draw(config.num_taps * config.target_hidden_size)
    positions = torch.arange(_NUM_TOKENS)
    hidden, steps = head.fuse(features), []
    token_ids = torch.arange(_NUM_TOKENS) * (config.vocab_size // _NUM_TOKENS)
    for _ in range(_NUM_STEPS):
        own = head.own_embedding
        embeds = draw(config.hidden_size) if own is None else own[token_ids].to(features.dtype)
        output = head(embeds, hidden, positions, _attend(window))
        hidden = output.feedback_TD
        steps.append(head.logits(output.normed_TD).float())
    return torch.cat(steps)


def _attend(window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention over the batch, within the head's window."""

    def attend(query_THD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> Tensor:
        steps = torch.arange(query_THD.shape[0])
        distance = steps[:, None] - steps[None, :]
        seen = (distance >= 0) & (distance < (window or query_THD.shape[0]))
        out_HTD = torch.nn.functional.scaled_dot_product_attention(
            query_THD.transpose(0, 1)[None],
            keys_TGD.transpose(0, 1)[None],
            values_TGD.transpose(0, 1)[None],
            attn_mask=seen,
            enable_gqa=True,
        )[0]
        return out_HTD.transpose(0, 1)

    return attend
