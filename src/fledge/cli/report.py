"""`fledge report`: results on one page."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import print_json, say

DirectoriesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        help="What `fledge select`, `tune`, `bench` and `train` made; several are compared.",
        show_default=False,
    ),
]
TitleOption = Annotated[
    str | None, typer.Option("--title", metavar="TEXT", help="What the page is called.")
]
NoPicturesOption = Annotated[
    bool, typer.Option("--no-png", help="Only the page and its data, no PNG files.")
]


def report(
    directories: DirectoriesArgument,
    out: options.OutOption,
    title: TitleOption = None,
    no_png: NoPicturesOption = False,
    json: options.JsonOption = False,
) -> None:
    """Draw results on one page.

    The page needs no network: pictures and style are inside. Behind every picture is its table.
    OUT gets report.html, report.json and plots/*.png; an older report there is replaced.

    Example: [cyan]fledge report select/ bench/ --out report/[/cyan]

    Two heads, engines or dates: [cyan]fledge report bench/june bench/july --out report/[/cyan]

    One JSON document comes with --json, the same as OUT/report.json: title, headline, figures,
    sources, charts.
    """
    from fledge.lab.report import PAGE_NAME, make_report

    made = make_report(
        directories, out, title=title, has_pictures=not no_png, progress=terminal_progress()
    )
    if json:
        print_json({"out": str(out), **made.to_json()})
    else:
        say(made.headline)
        print(out / PAGE_NAME)
