"""`fledge export`: a head in the format of another engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli import options
from fledge.cli.engine_options import EnginePythonOption, check_tuned
from fledge.cli.progress import terminal_progress
from fledge.cli.render import print_json, say
from fledge.contracts.dialects import (
    DIALECTS,
    ENGINE_OF,
    PRECISIONS,
    Dialect,
    HeadPrecision,
)
from fledge.contracts.errors import ConfigError
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings, read_tuned

if TYPE_CHECKING:
    from fledge.interop.engines.compare import Trial
    from fledge.interop.export import ExportReport

HeadArgument = Annotated[
    Path,
    typer.Argument(
        metavar="HEAD",
        help="Directory of the head: a checkpoint of `fledge train`, or an imported one.",
        show_default=False,
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="|".join(DIALECTS),
        help="Which engine or library reads the result.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Directory of the result; a new one."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model the head was made for: sizes and layers are compared with it. Only its "
        "config is read, except for gguf and openvino and heads with turned rows, which need it.",
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Read the result back by the engine's own rules, and compare layers and logits; where "
        "the engine is installed, run it and compare how many drafts it accepts.",
    ),
]
PrecisionOption = Annotated[
    HeadPrecision | None,
    typer.Option(
        "--precision",
        metavar="|".join(PRECISIONS),
        help="With gguf: round the head's matrices, which makes drafting on a CPU faster. By "
        "default they stay as they are.",
        show_default=False,
    ),
]
_SETTINGS = "Settings in the serve command"
TunedOption = Annotated[
    Path | None,
    typer.Option(
        "--tuned",
        metavar="DIR",
        help="What a tuning of the head found best; the options below say it by hand.",
        rich_help_panel=_SETTINGS,
    ),
]
DepthOption = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="N",
        help="Drafted tokens on the longest path, as tuned for the head.",
        rich_help_panel=_SETTINGS,
    ),
]
WidthOption = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        help="Children kept per node; 1 makes the tree a chain.",
        show_default="1",
        rich_help_panel=_SETTINGS,
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--budget",
        metavar="N",
        help="Drafted nodes checked by one target pass, root not counted.",
        rich_help_panel=_SETTINGS,
    ),
]


def export(
    head: HeadArgument,
    to: ToOption,
    out: OutOption,
    target: TargetOption = None,
    verify: VerifyOption = False,
    engine_python: EnginePythonOption = None,
    precision: PrecisionOption = None,
    tuned: TunedOption = None,
    depth: DepthOption = None,
    width: WidthOption = None,
    budget: BudgetOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write a head for another engine: vLLM, SGLang, llama.cpp, OpenVINO and others.

    Tensors, keys and layer numbers are those the engine reads. What it would misread without a
    word is refused, with the nearest thing that works. Beside the weights lies a README with the
    command that serves them.

    Example: [cyan]fledge export head/ --to vllm --out head-vllm/ --verify[/cyan]

    One JSON document comes with --json: directory, to, files, serve_command, notes, checks.
    """
    dialect, settings = _dialect(to), _settings(tuned, depth, width, budget)
    if engine_python is not None:
        _check_engine(dialect, target, verify=verify)
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.interop.export import export_head

    tuned_settings = check_tuned(settings, target=None, head=head)
    trial, missing = None, list[str]()
    if verify:
        trial, missing = _trial(dialect, head, target, tuned_settings, engine_python)
    report = export_head(
        head,
        out,
        dialect,
        target=target,
        tuned=tuned_settings,
        precision=precision,
        verify=verify,
        trial=trial,
        progress=progress,
    )
    _show(report, [*report.notes, *missing], is_json=json)


def _show(report: "ExportReport", notes: list[str], *, is_json: bool) -> None:
    if is_json:
        print_json(
            {
                "directory": str(report.directory),
                "to": report.to,
                "files": list(report.files),
                "serve_command": report.serve_command,
                "notes": notes,
                "checks": list(report.checks),
            }
        )
        return
    for check in report.checks:
        say(f"verified · {check}")
    for note in notes:
        say(f"note · {note}")
    say(f"{report.directory}: {', '.join(report.files)}; serve it with:")
    print(report.serve_command)


def _dialect(to: str) -> Dialect:
    for dialect in DIALECTS:
        if to == dialect:
            return dialect
    raise typer.BadParameter(f"{to!r} is none of {', '.join(DIALECTS)}.", param_hint="--to")


def _check_engine(to: Dialect, target: str | None, *, verify: bool) -> None:
    """A Python that would not be used must not be dropped quietly."""
    problem = None
    if not verify:
        problem = "it belongs to --verify."
    elif to not in ENGINE_OF:
        problem = f"an export for {to} is not run by fledge."
    elif target is None:
        problem = "it needs --target."
    if problem is not None:
        raise typer.BadParameter(problem, param_hint="--engine-python")


def _trial(
    to: Dialect, head: Path, target: str | None, tuned: TunedSettings | None, python: Path | None
) -> "tuple[Trial | None, list[str]]":
    """The run in the engine itself that belongs to --verify, or why there is none."""
    from fledge.interop.engines.compare import Trial
    from fledge.interop.engines.installation import engine_title, find_engine
    from fledge.interop.serve_commands import chain_of

    if to not in ENGINE_OF or target is None:
        return None, []
    name = ENGINE_OF[to]
    try:
        engine = find_engine(name, python)
    except ConfigError:
        if python is not None:
            raise
        missing = f"{engine_title(name)} is not installed beside fledge, so its acceptance was not"
        return None, [f"{missing} compared; --engine-python names a Python that has it."]
    trial = Trial(
        engine=engine,
        to=to,
        target=target,
        head=head,
        depth=chain_of(tuned),
        progress=terminal_progress(),
    )
    return trial, []


def _settings(
    tuned: Path | None, depth: int | None, width: int | None, budget: int | None
) -> TunedSettings | None:
    is_by_hand = any(typed is not None for typed in (depth, width, budget))
    if tuned is not None:
        if is_by_hand:
            raise typer.BadParameter("either --tuned, or --depth and others.", param_hint="--tuned")
        return read_tuned(tuned)
    if depth is None:
        if is_by_hand:
            raise typer.BadParameter("--width and --budget need --depth.", param_hint="--depth")
        return None
    children = 1 if width is None else width
    if budget is None:
        budget = depth if children == 1 else options.TREE.budget
    return TunedSettings(tree=TreeSettings(depth=depth, width=children, budget=budget))
