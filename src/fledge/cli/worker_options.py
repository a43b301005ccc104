"""How many processes share the work on rows, for the verbs that can have several."""

from typing import Annotated

import typer

WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Processes that work on rows; by default as many as the cores allow, and none beside "
        "this one for small inputs.",
    ),
]
