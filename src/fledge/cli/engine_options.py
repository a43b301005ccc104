"""Options of the verbs that can hand their work to another engine."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli.options import DRAFTING
from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import ServingEngine
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings, read_tuned

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


TunedOption = Annotated[
    Path | None,
    typer.Option(
        "--tuned",
        metavar="DIR",
        help="Draft as tuning found best: a directory with tune.json.",
        rich_help_panel=DRAFTING,
    ),
]


def tuned_settings(directory: Path | None, tree: TreeSettings) -> TunedSettings | None:
    """What tuning found, or what was typed after --depth and its kin; None for neither."""
    if directory is None:
        return None if tree == TreeSettings() else TunedSettings(tree=tree)
    if tree != TreeSettings():
        raise ConfigError("--tuned says how to draft; leave out --depth, --width and --budget.")
    return read_tuned(directory.expanduser())


def check_engine(
    engine: ServingEngine, python: Path | None, *, print_command: bool = False
) -> None:
    """Refuse options that mean nothing for fledge's own engine."""
    if engine == "fledge" and (python is not None or print_command):
        option = "--engine-python" if python is not None else "--print-command"
        raise ConfigError(f"{option} is for other engines; add --engine vllm, sglang or llamacpp.")
