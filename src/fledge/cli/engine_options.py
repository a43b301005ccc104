"""Options of the verbs that can hand their work to another engine."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import ServingEngine
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings

_PANEL = "Engine"

EngineOption = Annotated[
    ServingEngine,
    typer.Option(
        "--engine",
        metavar="fledge|vllm|sglang|llamacpp",
        help="Who runs the target: fledge itself, or another engine with the exported head.",
        rich_help_panel=_PANEL,
    ),
]
EnginePythonOption = Annotated[
    Path | None,
    typer.Option(
        "--engine-python",
        metavar="FILE",
        help="Python of the environment that has the engine; by default fledge's own.",
        rich_help_panel=_PANEL,
    ),
]
PrintCommandOption = Annotated[
    bool,
    typer.Option(
        "--print-command",
        help="With another engine: print the command that serves, and do not run it.",
        rich_help_panel=_PANEL,
    ),
]


def tuned_tree(tree: TreeSettings) -> TunedSettings | None:
    """What was typed after --depth, --width and --budget; None when nothing was."""
    return None if tree == TreeSettings() else TunedSettings(tree=tree)


def check_engine(
    engine: ServingEngine, python: Path | None, *, print_command: bool = False
) -> None:
    """Refuse options that mean nothing for fledge's own engine."""
    if engine == "fledge" and (python is not None or print_command):
        option = "--engine-python" if python is not None else "--print-command"
        raise ConfigError(f"{option} is for other engines; add --engine vllm, sglang or llamacpp.")
