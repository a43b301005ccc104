"""`fledge capture`: the target reads a corpus once and leaves behind what training needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json, say
from fledge.contracts.recipe import load_recipe
from fledge.store.capacity import format_bytes
from fledge.store.manifest import CORPUS, read_input

if TYPE_CHECKING:
    from fledge.features.capture_plan import CapturePlan
    from fledge.store.manifest import Manifest

CorpusArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CORPUS",
        help="A directory that `fledge tokenize` made.",
        show_default=False,
    ),
]
FeaturesOutOption = Annotated[
    str,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Directory of the result, or s3://, gs:// or az://; a new one, an empty one, or one "
        "to go on in.",
        rich_help_panel="Output",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model that reads: the one the corpus was tokenized for; by default the recipe's.",
    ),
]


def capture(
    corpus: CorpusArgument,
    out: FeaturesOutOption,
    target: TargetOption = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Have the target read a corpus, and keep its hidden states for training.

    Stored are the tapped layers of every token that a label is reached from, and the target's
    distribution where the loss looks. Interrupted, the same command goes on where it stopped.

    Example: [cyan]fledge capture corpus/tiny --out features/tiny[/cyan]

    With settings: [cyan]fledge capture corpus/tiny --out s3://bucket/features --set
    capture.features=q6 --set capture.layers=auto[/cyan]

    One JSON document comes with --json: out, target, fingerprint, taps, features, target_format,
    dtype, samples, samples_without_labels, tokens, feature_rows, label_rows, shards, stored_bytes,
    bytes_per_token. With --plan as well: facts, formats, total_bytes, needed_bytes, free_bytes,
    num_shards, device_bytes, host_bytes, seconds and more.
    """
    chosen = load_recipe(recipe, assignments or ())
    # Before torch is imported: a wrong path should cost nothing.
    read_input(corpus, CORPUS)
    progress = terminal_progress()
    name = target or chosen.target
    with progress.task(f"reading what is known of {name}", unit=""):
        from fledge.features import capture as stage
        from fledge.features.capture_job import estimate, open_input
        from fledge.features.device_speed import measure_flops
        from fledge.models.placement import pick_device, pick_dtype

        place = pick_device(device)
        given = open_input(
            corpus,
            name,
            chosen.capture,
            dtype=pick_dtype(dtype, place),
            device=place,
            needs_weights=not plan,
            progress=progress,
        )
    if plan:
        planned = estimate(given, measure_flops(place, given.dtype))
        _show_plan(planned, out, stage.free_room(out), json=json)
        stage.require_room(out, planned.needed_bytes)
        return
    _show(out, stage.capture(given, out, progress), json=json)


def _show_plan(plan: "CapturePlan", out: str, free: int | None, *, json: bool) -> None:
    if json:
        print_json({"out": out, **plan.to_json(), "free_bytes": free})
        return
    room = "an object store" if free is None else f"{format_bytes(free)} free"
    print("\n".join([*plan.lines(), f"into: {out} ({room})"]))


def _show(out: str, manifest: "Manifest", *, json: bool) -> None:
    counts: dict[str, Any] = dict(manifest.counts)
    identity = manifest.plan.identity
    layout = identity["features"]
    stored = sum(entry["bytes"] for entry in manifest.files.values())
    per_token = stored / counts["tokens"]
    if json:
        print_json(
            {
                "out": out,
                "target": identity["target"],
                "fingerprint": manifest.fingerprint,
                "taps": layout["taps"],
                "features": layout["features"],
                "target_format": layout["target"],
                "dtype": layout["dtype"],
                **counts,
                "stored_bytes": stored,
                "bytes_per_token": per_token,
            }
        )
        return
    taps = ", ".join(map(str, layout["taps"]))
    say(
        f"{count(counts['samples'], 'sample')}, {count(counts['tokens'], 'token')}: layers {taps} "
        f"as {layout['features']}, {count(counts['label_rows'], 'label')} as {layout['target']}"
    )
    if counts["samples_without_labels"]:
        say(f"left out {count(counts['samples_without_labels'], 'sample')} without a label")
    say(
        f"{format_bytes(stored)} in {count(counts['shards'], 'shard')}, "
        f"{per_token:,.0f} bytes a token"
    )
    print(out)
