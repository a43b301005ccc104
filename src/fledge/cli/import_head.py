"""`fledge import`: a head that others wrote, made one of ours."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import print_json, say

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|ID",
        help="A head's directory, or its id on the Hugging Face hub.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Directory of the head; a new one."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model the head was made for: it is compared with it, and takes what it shares "
        "with it from there.",
    ),
]


def import_head(
    source: SourceArgument,
    out: OutOption,
    target: TargetOption = None,
    json: options.JsonOption = False,
) -> None:
    """Take over a head in the layout of EAGLE, SpecForge, speculators or Model-Optimizer.

    Every tensor is used, or named in an error. Afterwards the head works like one of ours:
    generate, serve, select and export take it.

    Example: [cyan]fledge import their-head/ --target my-target/ --out imported/[/cyan]

    One JSON document comes with --json: directory, source, layout, num_tensors, layers, notes.
    """
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.interop.import_head import import_head as run

    report = run(source, out, target=target, progress=progress)
    if json:
        print_json(
            {
                "directory": str(report.directory),
                "source": str(report.source),
                "layout": report.layout,
                "num_tensors": report.num_tensors,
                "layers": None if report.taps is None else list(report.taps),
                "notes": list(report.notes),
            }
        )
        return
    for note in report.notes:
        say(f"note · {note}")
    layers = "2, n//2, n-3" if report.taps is None else ", ".join(map(str, report.taps))
    say(
        f"{report.directory}: {report.num_tensors} tensors, read from {report.layout}'s layout; "
        f"target layers {layers} (completed)"
    )
