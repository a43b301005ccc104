"""fledge: the same language model, the same outputs, faster."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Engine", "EngineSettings", "SamplingParams", "TreeSettings", "__version__"]

if TYPE_CHECKING:
    from fledge.contracts.sampling import SamplingParams
    from fledge.contracts.settings import EngineSettings, TreeSettings
    from fledge.engine.engine import Engine

_HOMES = {
    "Engine": "fledge.engine.engine",
    "EngineSettings": "fledge.contracts.settings",
    "SamplingParams": "fledge.contracts.sampling",
    "TreeSettings": "fledge.contracts.settings",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `fledge --help` never pays for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
