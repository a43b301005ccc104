"""Which target layers a head reads, as each engine can be told.

Engines walk through the target's layers once and keep the states whose number is on their list, so
they hand them over in ascending order and each once, whatever order the list has.
"""

from fledge.contracts.errors import MismatchError
from fledge.interop.target_facts import TargetFacts
from fledge.models.head_config import HeadConfig


def known_taps(config: HeadConfig, target: TargetFacts | None) -> tuple[int, ...] | None:
    """Completed layers the head reads; None for the default of a target that was not named."""
    if config.taps is not None:
        return config.taps
    return None if target is None else config.resolve_taps(target.num_layers)


def check_ascending(taps: tuple[int, ...] | None, engine: str) -> None:
    """Refuse an order of layers that an engine would change without a word."""
    if taps is None or all(low < high for low, high in zip(taps, taps[1:], strict=False)):
        return
    raise MismatchError(
        f"the head reads the target after {list(taps)} completed layers, in that order; {engine} "
        "hands layers over in ascending order and each once, so the head would read other states "
        "than it was trained on. Train it on ascending, distinct layers (capture.layers)."
    )
