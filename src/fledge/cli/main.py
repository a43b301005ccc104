"""The `fledge` program: finds the verb, runs it, and turns what went wrong into one line.

Results are written on stdout by the verbs; everything said here goes to stderr. Neither this module
nor a verb's module imports torch: a verb does so inside its function, so that `--help` is instant.
"""

import inspect
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fledge import __version__
from fledge.cli.full_device import explain_full_device
from fledge.cli.log import set_up_logging
from fledge.contracts.errors import FledgeError

VERBS = (
    "demo",
    "generate",
    "chat",
    "run",
    "prepare",
    "regenerate",
    "tokenize",
    "capture",
    "train",
    "sweep",
    "select",
    "tune",
    "bench",
    "report",
    "export",
    "import",
    "serve",
    "doctor",
)
"""Each is a function of the same name in the module of the same name, in the order of the help."""

_MODULES = {"import": "import_head"}
"""Verbs that Python keeps for itself."""

_DEBUG = "--debug"
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _VerbTable(Mapping[str, Any]):
    """Verbs by name; a verb's module is imported when the verb is looked at."""

    def __getitem__(self, name: str) -> Any:
        if name not in VERBS:
            raise KeyError(name)
        verb = typer.Typer(add_completion=False, rich_markup_mode="rich")
        module = _MODULES.get(name, name)
        function = getattr(import_module(f"fledge.cli.{module}"), module)
        verb.command(name, help=_paragraphs(function.__doc__))(function)
        return get_command(verb)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _paragraphs(text: str) -> str:
    """A docstring whose lines end where the terminal's do, and not where the source's did."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


class _LazyVerbs(TyperGroup):
    """A group whose verbs are loaded on use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _VerbTable()  # type: ignore[assignment]  # nobody adds verbs later


app = typer.Typer(cls=_LazyVerbs, add_completion=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def fledge(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show log lines, and the traceback of an error.")
    ] = False,
) -> None:
    """Make a language model answer faster without changing what it says.

    Start with [bold]fledge demo[/bold]; [bold]fledge doctor[/bold] says what this machine offers.

    Example: [cyan]fledge generate --prompt "Name three rivers." --max-tokens 60[/cyan]
    """
    set_up_logging(debug=debug)
    if version:
        print(f"fledge {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; the exit code is 0, 1 (it failed), 2 (wrong use) or 130 (interrupted)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # People append --debug to the command that has just failed, so it may stand anywhere.
    is_debug = _DEBUG in given
    words = [_DEBUG] * is_debug + [word for word in given if word != _DEBUG]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may hold characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        exit_code = _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted; nothing that was finished is lost, the same command may be run again.")
        exit_code = _INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        exit_code = _BROKEN_PIPE
    except Exception as error:
        exit_code = _explain(error, is_debug=is_debug)
    return exit_code


def _run(words: list[str]) -> int:
    """One verb, all errors left to the caller."""
    command = get_command(app)
    try:
        with command.make_context("fledge", words) as context:
            command.invoke(context)
    except typer.Exit as leaving:
        return leaving.exit_code
    return 0


def _explain(error: Exception, *, is_debug: bool) -> int:
    """Say what went wrong; returns the exit code."""
    if is_debug:
        traceback.print_exception(error)
    if isinstance(error, FledgeError):
        _say(f"error: {error}")
        return error.exit_code
    if hasattr(error, "format_message"):  # a wrong option or verb: the parser's own errors
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "fledge"
        message = error.format_message().replace("Value error, ", "")
        _say(f"error: {message} (`{path} --help` lists what there is)")
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, ModuleNotFoundError) and not (error.name or "fledge").startswith("fledge"):
        _say(
            f"error: this needs the package {error.name}, which is not installed; install fledge "
            "with everything it needs: pip install fledge."
        )
        return 1
    if full := explain_full_device(error):
        _say(f"error: {full}")
        return 1
    what = f"{type(error).__name__}: {error}".strip().rstrip(":").splitlines()[0]
    hint = "" if is_debug else f"; run again with {_DEBUG} for the traceback"
    _say(f"error: unexpected {what}{hint}")
    return 1


def _say(line: str) -> None:
    """One line on stderr, on a line of its own even after half a line of answer."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        line = "\n" + line if line.startswith("interrupted") else line
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # Whoever read our messages has gone as well; the exit code is all that is left to say.
        return


def _abandon_stdout() -> None:
    """Nobody reads any more: let what is still buffered go nowhere, without a complaint at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
