"""Settings of capture and training: what is refused, and that the message names the value."""

from typing import Any

import pytest

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.head_settings import HeadSettings
from fledge.contracts.recipe import read_recipe
from fledge.contracts.toml_settings import read_settings, to_plain
from fledge.contracts.train_settings import (
    HeldOutSettings,
    LossSettings,
    OptimizerSettings,
    TrainSettings,
)

REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (CaptureSettings, {"top_k": 0}, "top_k is 0; it must be at least 1."),
    (CaptureSettings, {"pass_tokens": 0}, "pass_tokens is 0; it must be at least 1."),
    (CaptureSettings, {"shard_tokens": -1}, "shard_tokens is -1; it must be at least 1."),
    (CaptureSettings, {"layers": ()}, "layers is an empty list; name at least one completed"),
    (CaptureSettings, {"layers": (2, -1)}, "a layer is -1; it must be at least 0."),
    (HeadSettings, {"mlp_width": -1}, "mlp_width is -1; it must be at least 0."),
    (HeadSettings, {"attention_heads": -1}, "attention_heads is -1; it must be at least 0."),
    (HeadSettings, {"sliding_window": -1}, "sliding_window is -1; it must be at least 0."),
    (HeadSettings, {"rope_theta": -1.0}, "rope_theta is -1.0; it must be at least 0."),
    (LossSettings, {"steps": 0}, "steps is 0; it must be between 1 and 32."),
    (LossSettings, {"steps": 33}, "steps is 33; it must be between 1 and 32."),
    (LossSettings, {"target_temperature": 0.0}, "target_temperature is 0.0; it must be between"),
    (LossSettings, {"draft_temperature": 11.0}, "draft_temperature is 11.0; it must be between"),
    (LossSettings, {"early_steps": 8}, "early_steps is 8; it must be between 0 and 7."),
    (LossSettings, {"early_share": 1.5}, "early_share is 1.5; it must be between 0 and 1."),
    (LossSettings, {"step_decay": 0.0}, "step_decay is 0.0; it must be between 0.01 and 1."),
    (LossSettings, {"step_decay": 1.1}, "step_decay is 1.1; it must be between 0.01 and 1."),
    (LossSettings, {"start_share": 1.5}, "start_share is 1.5; it must be between 0 and 1."),
    (LossSettings, {"start_share": 0.5}, "start_share is 0.5 and chain_weights false; where"),
    (LossSettings, {"feature_weight": -0.1}, "feature_weight is -0.1; it must be at least 0."),
    (OptimizerSettings, {"learning_rate": 0.0}, "learning_rate is 0.0; it must be between 1e-09"),
    (OptimizerSettings, {"learning_rate": float("nan")}, "learning_rate is nan; it must be"),
    (OptimizerSettings, {"muon_rate": 0.0}, "muon_rate is 0.0; it must be between 1e-09 and"),
    (OptimizerSettings, {"min_ratio": 1.5}, "min_ratio is 1.5; it must be between 0 and 1."),
    (OptimizerSettings, {"warmup": 2.0}, "warmup is 2.0; it must be between 0 and 1."),
    (OptimizerSettings, {"muon_decay": 11.0}, "muon_decay is 11.0; it must be between 0 and 10"),
    (OptimizerSettings, {"weight_decay": -1.0}, "weight_decay is -1.0; it must be between 0"),
    (OptimizerSettings, {"clip": -1.0}, "clip is -1.0; it must be at least 0."),
    (OptimizerSettings, {"ema": 1.0}, "ema is 1.0; it must be between 0 and 0.999999."),
    (OptimizerSettings, {"betas": (0.9,)}, "betas has 1 numbers; AdamW takes 2."),
    (OptimizerSettings, {"betas": (0.9, 1.0)}, "a beta is 1.0; it must be between 0 and 0.999999"),
    (HeldOutSettings, {"share": 0.6}, "share is 0.6; it must be between 0.0 and 0.5."),
    (HeldOutSettings, {"max_samples": 0}, "max_samples is 0; it must be at least 1."),
    (HeldOutSettings, {"decode_tokens": 0}, "decode_tokens is 0; it must be at least 1."),
    (HeldOutSettings, {"every": -1}, "every is -1; it must be at least 0."),
    (HeldOutSettings, {"decode_prompts": -1}, "decode_prompts is -1; it must be at least 0."),
    (HeldOutSettings, {"decode_depth": -1}, "decode_depth is -1; it must be at least 0."),
    (TrainSettings, {"epochs": 0}, "epochs is 0; it must be at least 1."),
    (TrainSettings, {"max_steps": -1}, "max_steps is -1; it must be at least 0."),
    (TrainSettings, {"checkpoint_every": -1}, "checkpoint_every is -1; it must be at least 0."),
    (TrainSettings, {"keep_checkpoints": -1}, "keep_checkpoints is -1; it must be at least 0."),
    (TrainSettings, {"micro_tokens": 8}, "micro_tokens is 8; it must be at least 16."),
    (TrainSettings, {"hidden_noise": -0.1}, "hidden_noise is -0.1; it must be between 0 and 10."),
    (
        TrainSettings,
        {"batch_tokens": 4096, "micro_tokens": 8192},
        "batch_tokens is 4096 and micro_tokens 8192; the first must be a multiple of the second.",
    ),
    (
        TrainSettings,
        {"batch_tokens": 10000, "micro_tokens": 4096},
        "batch_tokens is 10000 and micro_tokens 4096; the first must be a multiple of the second.",
    ),
    (
        TrainSettings,
        {"parallel": "fsdp", "optimizer": OptimizerSettings(kind="muon")},
        'parallel is "fsdp" and optimizer.kind "muon": Muon needs whole matrices',
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), REFUSED)
def test_what_is_refused(cls: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "cls",
    [
        CaptureSettings,
        HeadSettings,
        LossSettings,
        OptimizerSettings,
        HeldOutSettings,
        TrainSettings,
    ],
)
def test_defaults_are_allowed_and_go_through_toml(cls: type[Any]) -> None:
    assert read_settings(cls, to_plain(cls()), where="") == cls()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"capture": {"layers": "deepest"}},
            "capture.layers is 'deepest'; it must be one of 'default', 'auto', or a list.",
        ),
        ({"capture": {"layers": []}}, "in capture: layers is an empty list"),
        ({"capture": {"features": "q7"}}, "capture.features is 'q7'; it must be one of 'exact'"),
        ({"capture": {"feature": "q5"}}, "capture has no setting `feature`; did you mean"),
        ({"train": {"optimizer": {"clip": -1}}}, "in train.optimizer: clip is -1.0; it must be"),
        ({"train": {"loss": {"kind": "l2"}}}, "train.loss.kind is 'l2'; it must be one of"),
    ],
)
def test_recipes_name_the_place(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(table)
    assert str(caught.value).startswith(message)


def test_layers_in_a_recipe_and_on_the_command_line() -> None:
    assert read_recipe({"capture": {"layers": [2, 9]}}).capture.layers == (2, 9)
    assert read_recipe({}, ["capture.layers=[1, 2, 3]"]).capture.layers == (1, 2, 3)
    assert read_recipe({}, ["capture.layers=auto"]).capture.layers == "auto"
    recipe = read_recipe({}, ["train.optimizer.betas=[0.8, 0.9]", "train.loss.steps=3"])
    assert recipe.train.optimizer.betas == (0.8, 0.9)
    assert recipe.train.loss.steps == 3
