"""`fledge select`: which of some heads is fastest on real tasks."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json, say
from fledge.contracts.recipe import load_recipe
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import TreeSettings

if TYPE_CHECKING:
    from fledge.lab.select_job import SelectJob
    from fledge.store.manifest import Manifest

_MEASURING = "Measuring"

HeadsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CHECKPOINTS",
        help="Heads, or directories of `fledge train` or `fledge sweep` with all heads in them.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="NAME", help="The model the heads are for; by default the recipe's."
    ),
]
SuiteOption = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Prompts to measure on: builtin, a file, mt-bench, gsm8k, humaneval or hf://...; may "
        "be given several times.",
        rich_help_panel=_MEASURING,
    ),
]
PromptsOption = Annotated[
    int | None,
    typer.Option(
        "--prompts",
        metavar="N",
        help="Most prompts of each task; 0 takes all.",
        rich_help_panel=_MEASURING,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Longest answer, in tokens.",
        rich_help_panel=_MEASURING,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0 measures greedy answers; above, sampled ones by fixed seeds.",
        rich_help_panel=_MEASURING,
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Requests in flight.",
        rich_help_panel=_MEASURING,
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        help="How often everything is measured.",
        rich_help_panel=_MEASURING,
    ),
]
DepthOption = Annotated[
    int | None,
    typer.Option(
        "--depth", metavar="N", help="Depth of the draft tree.", rich_help_panel=_MEASURING
    ),
]
WidthOption = Annotated[
    int | None,
    typer.Option(
        "--width", metavar="N", help="Children kept per node.", rich_help_panel=_MEASURING
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--budget", metavar="N", help="Drafts that are verified.", rich_help_panel=_MEASURING
    ),
]
ControllerOption = Annotated[
    Literal["adaptive", "fixed"] | None,
    typer.Option(
        "--controller",
        metavar="adaptive|fixed",
        help="Draft as much as pays, up to the tree, or the whole tree always.",
        rich_help_panel=_MEASURING,
    ),
]
CopiesOption = Annotated[
    bool | None,
    typer.Option(
        "--copies/--no-copies",
        help="Draft chains that are copied from the text before, where that is likely to be right.",
        rich_help_panel=_MEASURING,
    ),
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Precision of the target and the heads.",
        rich_help_panel=_MEASURING,
    ),
]


def select(
    checkpoints: HeadsArgument,
    out: options.OutOption,
    target: TargetOption = None,
    suite: SuiteOption = None,
    prompts: PromptsOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    concurrency: ConcurrencyOption = None,
    repeats: RepeatsOption = None,
    depth: DepthOption = None,
    width: WidthOption = None,
    budget: BudgetOption = None,
    controller: ControllerOption = None,
    copies: CopiesOption = None,
    dtype: DtypeOption = None,
    device: options.DeviceOption = "auto",
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Measure heads on real tasks against plain decoding, and say which is fastest.

    All heads and plain decoding answer the same prompts in turns, on one loaded target. Slower
    heads are given up early. OUT gets scorecard.md and scorecard.json. Interrupted or killed, the
    same command goes on with what is missing.

    Example: [cyan]fledge select heads/tiny --suite builtin --prompts 4 --out chosen/tiny[/cyan]

    The settings are those of the recipe's table `select`; options change them.

    One JSON document comes with --json: out, fingerprint, and the scorecard (best, ties, verdict,
    heads, plain, cost, ...; docs/lab.md has all). With --plan as well: heads, tasks, questions,
    visits, rungs, answers, answers_without_halving, most_tokens.
    """
    chosen = load_recipe(recipe, assignments or ())
    settings = _with_options(
        chosen.select,
        suites=tuple(suite) if suite else None,
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        concurrency=concurrency,
        repeats=repeats,
        controller=controller,
        copies=copies,
        dtype=dtype,
        tree=_tree(chosen.select.tree, depth=depth, width=width, budget=budget),
    )
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.lab.select_job import prepare_job
        from fledge.lab.select_stage import select as run

    job = prepare_job(
        checkpoints,
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


def _with_options(settings: SelectSettings, **given: Any) -> SelectSettings:
    return replace(settings, **{name: one for name, one in given.items() if one is not None})


def _tree(tree: TreeSettings, **given: int | None) -> TreeSettings:
    changed: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    return replace(tree, **changed)


def _show_plan(job: "SelectJob", settings: SelectSettings, out: Path, *, json: bool) -> None:
    from fledge.lab.select_plan import plan_selection

    planned = plan_selection(job, settings)
    if json:
        print_json({"out": str(out), **planned.to_json()})
        return
    rungs = ", then ".join(
        f"{count(rung['num_heads'], 'head')} until visit {rung['num_visits']:,}"
        for rung in planned.rungs
    )
    print(
        f"measures: {count(planned.heads, 'head')} on {count(planned.questions, 'question')} of "
        f"{count(planned.tasks, 'task')}\n"
        f"visits: {rungs}\n"
        f"makes: {count(planned.answers, 'answer')} of at most {settings.max_tokens:,} tokens "
        f"({planned.answers_without_halving:,} without giving up slower heads)\n"
        f"writes: a scorecard into {out}"
    )


def _show(out: Path, manifest: "Manifest", *, json: bool) -> None:
    from fledge.lab.scorecard import read_scorecard, shown

    card = read_scorecard(out)
    if json:
        print_json({"out": str(out), "fingerprint": manifest.fingerprint, **card})
        return
    for one in card["heads"]:
        if one["rank"] is None:
            say(f"failed: {one['name']}: {one['error']}")
            continue
        tied = " (tied with the best)" if one["is_tied_with_best"] else ""
        say(
            f"{one['rank']}. {one['name']}: speed-up {shown(one['speed_up'])}, accept length "
            f"{shown(one['accept_length'])}{tied}"
        )
    cost = card["cost"]
    if cost["saved_share"] > 0:
        say(f"{cost['saved_share']:.0%} of the answers were saved by giving up slower heads early")
    say(card["verdict"])
    print(out)
