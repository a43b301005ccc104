"""`fledge sweep`: many short runs of training that differ in some settings, and which was best."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, duration, print_json, say
from fledge.cli.train import CorporaOption, FeaturesOption, TargetOption
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.recipe import Recipe, load_recipe
from fledge.store.capacity import format_bytes, free_bytes, require_disk

if TYPE_CHECKING:
    from fledge.contracts.sweep_settings import SweepSettings
    from fledge.store.manifest import Manifest
    from fledge.training.train_input import TrainInput

RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe with a table `sweep`: which settings are varied, and how.",
        show_default=False,
    ),
]


def sweep(
    recipe: RecipeArgument,
    out: options.OutOption,
    features: FeaturesOption = None,
    corpora: CorporaOption = None,
    target: TargetOption = None,
    device: options.DeviceOption = "auto",
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Train many heads that differ in some settings, and say which was best.

    Trials share the features and the target. One that falls behind the others on held-out prompts
    is given up early. Interrupted or killed, the same command goes on with the trial it was at.

    Example: [cyan]fledge sweep recipes/tiny-cpu.toml --features features/tiny --out
    sweeps/tiny[/cyan]

    OUT gets sweep.md, sweep.json and sweep.png (accept length over each setting); each trial is a
    run of its own: [cyan]fledge generate --head sweeps/tiny/trials/0002/run[/cyan]

    One JSON document comes with --json: out, target, fingerprint, method, knobs, trials (rank,
    trial, values, state, accept_length, best_step, steps, loss, ideal_speed_up, error, run). With
    --plan as well: trials, steps, tokens, stored_bytes, free_bytes, device_bytes, seconds.
    """
    chosen = load_recipe(recipe, assignments or ())
    settings = chosen.sweep
    if settings is None:
        raise ConfigError(
            f"{recipe} has no [sweep] table; name the settings to vary, for instance [sweep.space] "
            '"train.optimizer.learning_rate" = [1e-4, 4e-4].'
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, and a sweep runs its trials "
            "in one; start it without torchrun, or train one head with `fledge train`."
        )
    if (features is None) == (not corpora):
        raise ConfigError("give either --features, which all trials share, or --corpus.")
    progress = terminal_progress()
    with progress.task("starting", unit=""):
        # Importing torch takes seconds, so it happens while the bar is already there.
        from fledge.training.sweep import stage

        stage.check_sweep(settings, chosen.train)
    given = _open(
        chosen,
        features,
        corpora or [],
        target or chosen.target,
        device,
        progress,
        needs_weights=not plan,
    )
    if plan:
        _show_plan(given, chosen, settings, out, json=json)
        return
    manifest = stage.sweep(given, settings, chosen.train, out, progress=progress)
    _show(out, manifest, json=json)


def _open(
    recipe: Recipe,
    features: str | None,
    corpora: list[Path],
    target: str,
    device: str,
    progress: Progress,
    *,
    needs_weights: bool,
) -> "TrainInput":
    from fledge.models.placement import pick_device
    from fledge.training.train_input import open_input

    with progress.task(f"reading what is known of {target}", unit=""):
        return open_input(
            features=features,
            corpora=corpora,
            target=target,
            settings=recipe.train,
            capture=recipe.capture,
            is_capture_asked=True,
            device=pick_device(device),
            needs_weights=needs_weights,
            progress=progress,
        )


def _show_plan(
    given: "TrainInput", recipe: Recipe, settings: "SweepSettings", out: Path, *, json: bool
) -> None:
    from fledge.training.sweep.plan import plan_sweep

    planned, free = plan_sweep(given, settings, recipe.train), free_bytes(out)
    if json:
        print_json({"out": str(out), **planned, "free_bytes": free})
    else:
        print(
            f"makes: {count(planned['trials'], 'trial')}, {count(planned['steps'], 'step')}, "
            f"{count(planned['tokens'], 'token')}, if none is given up\n"
            f"writes: about {format_bytes(planned['stored_bytes'])} into {out} "
            f"({format_bytes(free)} free)\n"
            f"memory: about {format_bytes(planned['device_bytes'])} on {given.device}\n"
            f"time: about {duration(planned['seconds'])}, held-out measurements not counted"
        )
    require_disk(out, planned["stored_bytes"], "the checkpoints", place="output")


def _show(out: Path, manifest: "Manifest", *, json: bool) -> None:
    from fledge.training.sweep.report import read_report, table_of

    document = read_report(out)
    if json:
        target = manifest.plan.identity["target"]
        names = {"out": str(out), "target": target, "fingerprint": manifest.fingerprint}
        print_json({**names, **document})
        return
    for line in _aligned(*table_of(document)):
        say(line)
    for row in document["trials"]:
        if row["error"]:
            say(f"trial {row['trial']} failed: {row['error']}")
    best: dict[str, Any] = document["trials"][0]
    say(f"best: trial {best['trial']}, a head in {out / best['run']}; plot: {out / 'sweep.png'}")
    print(out)


def _aligned(heads: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in [heads, *rows]
    ]
