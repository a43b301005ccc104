"""`fledge run`: the whole road with one recipe."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import duration, print_json, say
from fledge.contracts.errors import ConfigError
from fledge.contracts.recipe import load_recipe
from fledge.contracts.run_settings import STAGES, StageName
from fledge.store.capacity import format_bytes, free_bytes

if TYPE_CHECKING:
    from fledge.pipeline.road import Road
    from fledge.pipeline.run import StageOutcome
    from fledge.pipeline.run_plan import PlannedStage

RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="The recipe of the run.", show_default=False)
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME", help="The model; by default that of the recipe."),
]
RedoOption = Annotated[
    str | None,
    typer.Option(
        "--redo",
        metavar="STAGE",
        help="Remove what this stage and those after it made, and make it again.",
    ),
]


def run(
    recipe: RecipeArgument,
    out: options.OutOption,
    target: TargetOption = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    assignments: options.SetOption = None,
    redo: RedoOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Go the whole road with one recipe: from prompts to a measured, exported head.

    Each stage has a directory below OUT. Interrupted or killed, the same command goes on where it
    stopped; finished stages are compared with the recipe and left as they are. The last one is a
    page with all results.

    Example: [cyan]fledge run recipes/tiny-cpu.toml --out runs/tiny[/cyan]

    What it would do: [cyan]fledge run recipes/tiny-cpu.toml --out runs/tiny --plan[/cyan]

    One JSON document comes with --json: out, target, stages, head, exports, report; with --plan:
    stages with state, work, written_bytes and seconds, and free_bytes.
    """
    chosen = load_recipe(recipe, assignments or ())
    again = _stage_name(redo)
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.pipeline.road import Road

    road = Road(
        recipe=replace(chosen, target=target or chosen.target),
        recipe_path=recipe,
        assignments=tuple(assignments or ()),
        out=out.expanduser().absolute(),
        command=_command(recipe, out, target, dtype, device, assignments or []),
        device=device,
        dtype=dtype,
        progress=progress,
    )
    if plan:
        _plan(road, again, json=json)
    else:
        _run(road, again, json=json)


def _stage_name(typed: str | None) -> StageName | None:
    for name in STAGES:
        if typed == name:
            return name
    if typed is not None:
        raise ConfigError(f"--redo {typed!r} is no stage; it may be {', '.join(STAGES)}.")
    return None


def _command(
    recipe: Path, out: Path, target: str | None, dtype: str, device: str, assignments: list[str]
) -> str:
    """What the user typed, less what is done once."""
    words = ["fledge", "run", str(recipe), "--out", str(out)]
    words += [] if target is None else ["--target", target]
    words += [] if dtype == "auto" else ["--dtype", dtype]
    words += [] if device == "auto" else ["--device", device]
    return shlex.join([*words, *(word for one in assignments for word in ("--set", one))])


def _plan(road: "Road", redo: StageName | None, *, json: bool) -> None:
    from fledge.pipeline.run_plan import plan_run

    if redo is not None:
        raise ConfigError("--plan changes nothing, so it does not go with --redo.")
    stages = plan_run(road)
    free = free_bytes(road.out)
    if json:
        print_json(
            {
                "out": str(road.out),
                "target": road.target,
                "stages": [stage.to_json() for stage in stages],
                "free_bytes": free,
            }
        )
        return
    for stage in stages:
        print(_line(stage))
    known = sum(stage.written_bytes or 0 for stage in stages)
    seconds = sum(stage.seconds or 0.0 for stage in stages)
    print(
        f"as far as is known: {format_bytes(known)} into {road.out} ({format_bytes(free)} free), "
        f"{duration(seconds)}"
    )


def _line(stage: "PlannedStage") -> str:
    figures = [stage.work]
    if stage.written_bytes is not None:
        figures.append(f"about {format_bytes(stage.written_bytes)}")
    if stage.seconds is not None:
        figures.append(f"about {duration(stage.seconds)}")
    return f"{stage.name + ':':12}{stage.state}; {', '.join(figures)}"


def _run(road: "Road", redo: StageName | None, *, json: bool) -> None:
    from fledge.pipeline.run import run as make

    _show(road, make(road, redo=redo), json=json)


def _show(road: "Road", outcomes: "list[StageOutcome]", *, json: bool) -> None:
    from fledge.pipeline.export_stage import read_exports
    from fledge.pipeline.lab_stages import chosen_head, page_of

    has_head = any(one.name in ("train", "select") for one in outcomes)
    head = chosen_head(road).directory if has_head else None
    exports = read_exports(road) if road.has("export") else {}
    page = page_of(road) if road.has("report") else None
    if json:
        print_json(
            {
                "out": str(road.out),
                "target": road.target,
                "stages": [one.to_json() for one in outcomes],
                "head": None if head is None else str(head),
                "exports": exports,
                "report": None if page is None else str(page),
            }
        )
        return
    made = [one for one in outcomes if one.state == "made"]
    say(f"{len(made)} of {len(outcomes)} stages made now, the others were finished before")
    if head is not None:
        say(f"head: {head}")
    for name, entry in exports.items():
        say(f"{name}: {entry['serve_command']}")
    print(page or road.out)
