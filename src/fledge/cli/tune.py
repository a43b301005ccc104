"""`fledge tune`: how far and how wide to draft with a head on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options, select
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json, say
from fledge.contracts.errors import ConfigError
from fledge.contracts.recipe import load_recipe
from fledge.contracts.tune_settings import TuneSettings

if TYPE_CHECKING:
    from fledge.lab.select_job import SelectJob
    from fledge.store.manifest import Manifest

_MEASURING = "Measuring"
_SHAPES = "What is tried"

HeadArgument = Annotated[
    Path,
    typer.Argument(
        metavar="HEAD",
        help="A head, or a directory of `fledge train` with its best one.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="NAME", help="The model the head is for; by default the recipe's."
    ),
]
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="1,8...",
        help="Requests in flight; of several loads, the best is so on average.",
        rich_help_panel=_MEASURING,
    ),
]
DepthsOption = Annotated[
    str | None,
    typer.Option("--depths", metavar="2,4...", help="Depths of the tree.", rich_help_panel=_SHAPES),
]
WidthsOption = Annotated[
    str | None,
    typer.Option(
        "--widths", metavar="1,2...", help="Children kept per node.", rich_help_panel=_SHAPES
    ),
]
BudgetsOption = Annotated[
    str | None,
    typer.Option(
        "--budgets", metavar="8,16...", help="Drafts that are verified.", rich_help_panel=_SHAPES
    ),
]
ControllersOption = Annotated[
    str | None,
    typer.Option(
        "--controllers",
        metavar="fixed,adaptive",
        help="Who decides in each cycle; shapes are compared with the first.",
        rich_help_panel=_SHAPES,
    ),
]


def tune(
    head: HeadArgument,
    out: options.OutOption,
    target: TargetOption = None,
    suite: select.SuiteOption = None,
    prompts: select.PromptsOption = None,
    max_tokens: select.MaxTokensOption = None,
    temperature: select.TemperatureOption = None,
    concurrency: ConcurrencyOption = None,
    repeats: select.RepeatsOption = None,
    depths: DepthsOption = None,
    widths: WidthsOption = None,
    budgets: BudgetsOption = None,
    controllers: ControllersOption = None,
    copies: select.CopiesOption = None,
    dtype: select.DtypeOption = None,
    device: options.DeviceOption = "auto",
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Find how deep, how wide and how much to draft with a head on this machine.

    A coarse grid first, then the neighbours of the fastest shape, then a final with each
    controller; all against plain decoding, in turns, on one loaded target. OUT gets tune.json and
    tune.md; `--tuned OUT` of serve, generate, chat and export reads it. Interrupted or killed, the
    same command goes on with what is missing.

    Example: [cyan]fledge tune heads/tiny --concurrency 1,8 --out tuned/tiny[/cyan]

    The settings are those of the recipe's table `tune`; options change them.

    One JSON document comes with --json: out, fingerprint, and tune.json (best, chain, ties,
    verdict, rows, plain, cost, ...; docs/lab.md has all). With --plan as well: shapes, visits,
    rungs, answers, answers_of_whole_lattice, most_tokens and others.
    """
    chosen = load_recipe(recipe, assignments or ())
    settings = _with_options(
        chosen.tune,
        suites=tuple(suite) if suite else None,
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        concurrency=_numbers("--concurrency", concurrency),
        repeats=repeats,
        depths=_numbers("--depths", depths),
        widths=_numbers("--widths", widths),
        budgets=_numbers("--budgets", budgets),
        controllers=tuple(controllers.split(",")) if controllers else None,
        copies=copies,
        dtype=dtype,
    )
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.lab.tune_stage import prepare_tuning
        from fledge.lab.tune_stage import tune as run

    job = prepare_tuning(
        head,
        target or chosen.target,
        settings,
        device=device,
        needs_weights=not plan,
        progress=progress,
    )
    if plan:
        _show_plan(job, settings, out, json=json)
        return
    _show(out, run(job, settings, out, progress=progress), json=json)


def _with_options(settings: TuneSettings, **given: Any) -> TuneSettings:
    return replace(settings, **{name: one for name, one in given.items() if one is not None})


def _numbers(option: str, typed: str | None) -> tuple[int, ...] | None:
    try:
        return None if typed is None else tuple(int(one) for one in typed.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} {typed!r} is no list of whole numbers; write it as 1,4,16."
        ) from None


def _show_plan(job: "SelectJob", settings: TuneSettings, out: Path, *, json: bool) -> None:
    from fledge.lab.tune_plan import plan_tuning

    planned = plan_tuning(job, settings)
    if json:
        print_json({"out": str(out), **planned.to_json()})
        return
    rungs = ", then ".join(
        f"{count(rung['num_heads'], 'shape')} until visit {rung['num_visits']:,}"
        for rung in planned.rungs
    )
    print(
        f"tries: {planned.shapes:,} of {count(planned.shapes_of_lattice, 'shape')} on "
        f"{count(planned.questions, 'question')} of {count(planned.tasks, 'task')}\n"
        f"visits: {rungs}; neighbours of the best, at most {settings.rounds} times; the final on "
        f"all {planned.visits:,}\n"
        f"makes: at most {count(planned.answers, 'answer')} of at most {settings.max_tokens:,} "
        f"tokens: {planned.answers_of_grid:,} for the grid, {planned.answers_of_neighbours:,} for "
        f"neighbours, {planned.answers_of_final:,} for the final "
        f"({planned.answers_of_whole_lattice:,} for every shape with each controller)\n"
        f"writes: tune.json and tune.md into {out}"
    )


def _show(out: Path, manifest: "Manifest", *, json: bool) -> None:
    from fledge.lab.tune_document import read_tuning
    from fledge.lab.tune_page import surface_lines

    document = read_tuning(out)
    if json:
        print_json({"out": str(out), "fingerprint": manifest.fingerprint, **document})
        return
    say("speed-up by depth and width (the fastest budget in brackets):")
    for line in surface_lines(document["rows"]):
        say(line)
    for row in document["rows"]:
        if row["error"]:
            say(f"failed: depth {row['depth']}, width {row['width']}: {row['error']}")
    say(document["verdict"])
    say(f"to draft so: fledge serve --head {document['head']} --tuned {out}")
    print(out)
