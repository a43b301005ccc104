"""Which layers a head reads, when nobody names them and when somebody does.

Layers are counted as completed layers. The field taps 2, n//2 and n-3. A hybrid target mixes full
attention with windows or other layers; there each default tap moves to the output of the nearest
layer with full attention, since only those have read the whole text.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from fledge.contracts.errors import ConfigError
from fledge.models.head_config import default_taps

_FULL = "full_attention"


def choose_taps(config: Any, layers: str | Sequence[int]) -> tuple[int, ...]:
    """Taps of a target, given its text config and `default` or explicit layers."""
    if isinstance(layers, str):
        assert layers == "default", "auto is decided by tap_probe"
        return default_taps_of(config)
    return check_layers(layers, int(config.num_hidden_layers))


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Explicit layers, refused where the target has no such layers."""
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise ConfigError(
                f"capture.layers names {layer}, and the target has {num_layers} layers: name "
                f"completed layers, from 0 to {num_layers}."
            )
    repeated = [layer for layer in layers if list(layers).count(layer) > 1]
    if repeated:
        raise ConfigError(
            f"capture.layers is {list(layers)} and names {repeated[0]} more than once; name "
            "distinct layers."
        )
    return tuple(layers)


def default_taps_of(config: Any) -> tuple[int, ...]:
    """2, n//2 and n-3 completed layers, moved to full attention in hybrid targets."""
    taps = default_taps(int(config.num_hidden_layers))
    full = full_outputs(config)
    return _moved(tuple(sorted(taps)), full) if full else taps


def full_outputs(config: Any) -> tuple[int, ...]:
    """Completed layers right after full attention; none where all layers are of one kind."""
    types = list(getattr(config, "layer_types", None) or ())
    if len(set(types)) < 2:
        return ()
    return tuple(number + 1 for number, kind in enumerate(types) if kind == _FULL)


def _moved(taps: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...]:
    """The nearest choice with as many taps behind full attention as there can be.

    With fewer layers of full attention than taps, the taps that are farther from one stay.
    """
    num_moved = min(len(taps), len(full))
    choices = []
    for places in combinations(range(len(taps)), num_moved):
        for outputs in combinations(full, num_moved):
            moved = list(taps)
            for place, output in zip(places, outputs, strict=True):
                moved[place] = output
            distance = sum(abs(new - old) for new, old in zip(moved, taps, strict=True))
            num_repeated = len(moved) - len(set(moved))
            deeper_first = [-tap for tap in sorted(moved, reverse=True)]
            choices.append((num_repeated, distance, deeper_first))
    return tuple(sorted(-tap for tap in min(choices)[2]))
