"""A target that has learnt a small language, and heads that have learnt to guess it: often right,
often wrong, so that every position of a draft has an acceptance of its own.

The sizes are those that all engines take: OpenVINO wants ten layers, vLLM's CPU attention heads of
32 channels.
"""

from dataclasses import replace
from pathlib import Path

import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.head_settings import HeadSettings
from fledge.contracts.train_settings import (
    HeldOutSettings,
    LossSettings,
    OptimizerSettings,
    TrainSettings,
)
from fledge.models.target import Target
from fledge.testing_language import ask, save_language_corpus, save_language_target
from fledge.training.stage import train
from fledge.training.train_input import open_input

NUM_LAYERS = 10
DEPTH = 4
_SIZES = {"num_hidden_layers": NUM_LAYERS, "head_dim": 32, "num_attention_heads": 2}
_SETTINGS = TrainSettings(
    max_steps=60,
    batch_tokens=512,
    micro_tokens=512,
    loss=LossSettings(steps=DEPTH),
    optimizer=OptimizerSettings(learning_rate=5e-3),
    held_out=HeldOutSettings(share=0.1, every=60, decode_prompts=20, decode_tokens=80),
)


def save_trained_target(directory: Path) -> Path:
    return save_language_target(directory, **_SIZES)


def save_corpus(directory: Path, target: Path) -> Path:
    return save_language_corpus(directory, target, num_prompts=400)


def save_trained_head(
    directory: Path, target: Path, corpus: Path, *, taps: tuple[int, ...], head: HeadSettings
) -> Path:
    """A head trained for some seconds on these completed layers."""
    settings = replace(_SETTINGS, head=head)
    given = open_input(
        features=None,
        corpora=[corpus],
        target=str(target),
        settings=settings,
        capture=CaptureSettings(layers=taps),
        is_capture_asked=True,
        device=torch.device("cpu"),
    )
    loaded = Target.load(target, dtype=torch.float32, device=torch.device("cpu"))
    train(given, settings, directory, target=loaded, has_plots=False)
    return directory


def prompts(count: int) -> list[str]:
    """Prompts that no head here was trained on."""
    return ask(count, seed=99)
