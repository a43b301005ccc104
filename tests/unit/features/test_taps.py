"""Default taps of plain and hybrid targets, and explicit ones that a target cannot have."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from fledge.contracts.errors import ConfigError
from fledge.features.taps import choose_taps, default_taps_of, full_outputs

FULL, WINDOW, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def config_of(num_layers: int, types: list[str] | None) -> Any:
    return SimpleNamespace(num_hidden_layers=num_layers, layer_types=types)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        pytest.param([FULL] * 32, (2, 16, 29), id="all full: the field's"),
        pytest.param([WINDOW] * 32, (2, 16, 29), id="all windows: the field's"),
        pytest.param(([WINDOW] * 5 + [FULL]) * 3, (6, 12, 18), id="gemma-3-270m"),
        pytest.param(([WINDOW] * 5 + [FULL]) * 10 + [WINDOW] * 2, (6, 30, 60), id="gemma-3-27b"),
        pytest.param(([WINDOW] * 3 + [FULL]) * 8, (4, 16, 28), id="OLMo-3-7B"),
        pytest.param(([WINDOW] * 3 + [FULL]) * 16, (4, 32, 60), id="OLMo-3-32B"),
        pytest.param([WINDOW, FULL] * 12, (2, 12, 22), id="gpt-oss-20b: a tie goes deeper"),
        pytest.param(([CHUNKED] * 3 + [FULL]) * 12, (4, 24, 44), id="llama 4: a tie goes deeper"),
        pytest.param([FULL] + [WINDOW] * 17, (1, 9, 15), id="one full layer takes the nearest tap"),
        pytest.param([WINDOW] * 11 + [FULL] + [WINDOW] * 6, (2, 12, 15), id="one in the middle"),
        pytest.param([FULL, FULL] + [WINDOW] * 16, (1, 2, 15), id="two full layers"),
        pytest.param([WINDOW] * 15 + [FULL] * 3, (16, 17, 18), id="all full ones at the end"),
        pytest.param([WINDOW, FULL] * 2, (1, 2, 4), id="shallow: distinct where the field repeats"),
        pytest.param([WINDOW, FULL], (0, 1, 2), id="two layers"),
    ],
)
def test_default_taps(types: list[str], expected: tuple[int, ...]) -> None:
    config = config_of(len(types), types)
    assert default_taps_of(config) == expected
    assert choose_taps(config, "default") == expected


def test_targets_without_layer_types_have_the_fields_taps() -> None:
    assert default_taps_of(config_of(30, None)) == (2, 15, 27)
    assert default_taps_of(SimpleNamespace(num_hidden_layers=4)) == (2, 2, 1)
    assert full_outputs(SimpleNamespace(num_hidden_layers=4)) == ()


@pytest.mark.parametrize(
    ("model_type", "num_layers", "expected"),
    [("gemma3_text", 18, (6, 12, 18)), ("olmo3", 32, (4, 16, 28)), ("llama", 30, (2, 15, 27))],
)
def test_configs_as_transformers_makes_them(
    model_type: str, num_layers: int, expected: tuple[int, ...]
) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=num_layers)
    assert default_taps_of(config) == expected


def test_explicit_layers_keep_their_order() -> None:
    assert choose_taps(config_of(18, None), (18, 0, 5)) == (18, 0, 5)
    assert choose_taps(config_of(18, None), [18]) == (18,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2, 9, 19), r"capture.layers names 19, and the target has 18 layers: name completed"),
        ((-1, 9), r"capture.layers names -1, and the target has 18 layers"),
        ((2, 9, 9), r"capture.layers is \[2, 9, 9\] and names 9 more than once"),
    ],
)
def test_layers_that_a_target_does_not_have(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_taps(config_of(18, None), layers)
