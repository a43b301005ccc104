"""Options of the verbs that can hand their work to another engine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fledge.cli.options import DRAFTING
from fledge.cli.progress import terminal_progress
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.outside_engines import ServingEngine
from fledge.contracts.settings import ControllerName, EngineSettings, TreeSettings
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
        help="Draft as `fledge tune` found best: its directory.",
        rich_help_panel=DRAFTING,
    ),
]

CopiesOption = Annotated[
    bool,
    typer.Option(
        "--copies/--no-copies",
        help="Draft chains that are copied from the text before, where the newest tokens stood "
        "there already and the head agrees or is unsure.",
        rich_help_panel=DRAFTING,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedDrafting:
    """How to draft as far as somebody typed it: a usual value counts when typed, None does not."""

    depth: int | None = None
    width: int | None = None
    budget: int | None = None
    controller: ControllerName | None = None
    copies: bool = EngineSettings().copies

    @property
    def tree(self) -> TreeSettings | None:
        """With the usual values for what was left out; None where all of it was."""
        sizes = {"depth": self.depth, "width": self.width, "budget": self.budget}
        typed = {name: size for name, size in sizes.items() if size is not None}
        return replace(TreeSettings(), **typed) if typed else None

    def over(self, tuned: TunedSettings | None) -> TunedSettings | None:
        """A tuning with the controller that was typed in place of its own."""
        if tuned is None or self.controller is None:
            return tuned
        return replace(tuned, controller=self.controller)


NOTHING_TYPED = TypedDrafting()


def tuned_settings(directory: Path | None, typed: TypedDrafting) -> TunedSettings | None:
    """What tuning found, or what was typed after --depth and its kin; None for neither."""
    tree = typed.tree
    if directory is None:
        return None if tree is None else TunedSettings(tree=tree)
    if tree is not None:
        raise ConfigError("--tuned says how to draft; leave out --depth, --width and --budget.")
    return read_tuned(directory.expanduser())


def drafting_controller(tuned: TunedSettings | None, typed: TypedDrafting) -> ControllerName:
    """The one that was typed, else the tuning's, else the usual one."""
    found = None if tuned is None else tuned.controller
    return typed.controller or found or EngineSettings().controller


def check_tuned(
    tuned: TunedSettings | None, *, target: str | None, head: Path | None
) -> TunedSettings | None:
    """Refuse what was tuned for another head, or for another target where one is named."""
    if tuned is None or tuned.made_for is None:
        return tuned
    made_for = tuned.made_for
    if head is None:
        raise ConfigError(
            f"--tuned says how to draft with the head {made_for.head}, and there is no head; add "
            "--head, or leave out --tuned."
        )
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, and only tuned settings need these.
        from fledge.lab.candidates import Candidate, fingerprints, is_head
        from fledge.models.resolve import resolve_target
        from fledge.models.weights_identity import weights_identity

    # A head that is not there, or no head, is for whoever loads it to complain about.
    if is_head(head):
        found = fingerprints([Candidate(name=str(head), directory=head)], progress)
        if found[str(head)] != made_for.fingerprint:
            raise MismatchError(
                f"the settings were tuned for the head {made_for.head}, and {head} holds another "
                "one; run `fledge tune` for it, or leave out --tuned."
            )
    if target is not None:
        directory = resolve_target(target, progress=progress).directory
        if weights_identity(directory) != made_for.weights:
            raise MismatchError(
                f"the settings were tuned for the target {made_for.target}, and {target} has other "
                "weights; run `fledge tune` for it, or leave out --tuned."
            )
    return tuned


def check_engine(
    engine: ServingEngine, python: Path | None, *, print_command: bool = False
) -> None:
    """Refuse options that mean nothing for fledge's own engine."""
    if engine == "fledge" and (python is not None or print_command):
        option = "--engine-python" if python is not None else "--print-command"
        raise ConfigError(f"{option} is for other engines; add --engine vllm, sglang or llamacpp.")
