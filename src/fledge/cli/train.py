"""`fledge train`: from features, or a corpus and its target, to a head."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, duration, print_json, say
from fledge.contracts.errors import ConfigError, FledgeError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.recipe import Recipe, load_recipe
from fledge.store.capacity import format_bytes, free_bytes, require_disk

if TYPE_CHECKING:
    from fledge.store.manifest import Manifest
    from fledge.training.distributed import Processes
    from fledge.training.train_plan import TrainPlan

FeaturesOption = Annotated[
    str | None,
    typer.Option(
        "--features",
        metavar="DIR",
        help="What `fledge capture` made, or s3://, gs:// or az://: train from stored features.",
    ),
]
CorporaOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--corpus",
        metavar="DIR",
        help="What `fledge tokenize` made: train beside the live target, with nothing stored. May "
        "be given several times; the draft vocabulary is that of the first, or one of all that is "
        "learned with train.head.draft_vocab_size.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model that the features or the corpus are of; by default the recipe's.",
    ),
]
StartOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="HEAD",
        help="Go on from this head's weights instead of beginning with a new one: other data, "
        "another loss, a head that `fledge import` brought.",
    ),
]


def train(
    out: options.OutOption,
    features: FeaturesOption = None,
    corpora: CorporaOption = None,
    start: StartOption = None,
    target: TargetOption = None,
    device: options.DeviceOption = "auto",
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Train a head on what the target said.

    OUT becomes a head directory: `fledge generate --head OUT`. So is every checkpoint in it on the
    way. Interrupted or killed, the same command goes on from the last checkpoint.

    Example: [cyan]fledge train --features features/tiny --out heads/tiny[/cyan]

    Beside the target: [cyan]fledge train --corpus corpus/tiny --out heads/tiny --set
    train.epochs=2[/cyan]

    From a head that is there: [cyan]fledge train --corpus corpus/new --from heads/tiny --out
    heads/newer[/cyan]

    On two GPUs: [cyan]torchrun --nproc-per-node 2 -m fledge train --features features/tiny --out
    heads/tiny[/cyan]

    One JSON document comes with --json: out, target, fingerprint, mode, samples, samples_held_out,
    steps, planned_steps, tokens, weights, best_step, best, last, mlp_width, tokens_per_s,
    data_wait_share.
    With --plan as well: tokens, steps, weights, read_bytes, checkpoint_bytes, stored_bytes,
    free_bytes, device_bytes, seconds.
    """
    chosen = load_recipe(recipe, assignments or ())
    if (features is None) == (not corpora):
        raise ConfigError(
            "give either --features, which `fledge capture` made, or --corpus, which `fledge "
            "tokenize` made: one of the two."
        )
    is_capture_asked = recipe is not None or any(
        assignment.strip().startswith("capture.") for assignment in assignments or ()
    )
    with ExitStack() as stack:
        progress = terminal_progress()
        with progress.task("starting", unit=""):
            # Importing torch takes seconds, so it happens while the bar is already there.
            from fledge.models.placement import pick_device
            from fledge.training.distributed import joined_processes

            processes = stack.enter_context(joined_processes(pick_device(device)))
        run = _Run(processes, chosen, target or chosen.target, progress)
        try:
            run.open(features, corpora or [], start, is_capture_asked, needs_weights=not plan)
            if plan:
                run.show_plan(out, json=json)
            else:
                run.train(out, json=json)
        except FledgeError as error:
            if processes.is_first:
                raise
            # The first process says it for all.
            raise typer.Exit(error.exit_code) from error


class _Run:
    """One process of a run, and what it shows: the others than the first are silent."""

    def __init__(
        self, processes: "Processes", recipe: Recipe, target: str, progress: Progress
    ) -> None:
        self._processes, self._recipe, self._target = processes, recipe, target
        self._progress: Progress = progress if processes.is_first else SilentProgress()

    def open(
        self,
        features: str | None,
        corpora: list[Path],
        start: Path | None,
        is_capture_asked: bool,
        *,
        needs_weights: bool,
    ) -> None:
        from fledge.training.train_input import open_input

        with self._progress.task(f"reading what is known of {self._target}", unit=""):
            self._given = open_input(
                features=features,
                corpora=corpora,
                target=self._target,
                settings=self._recipe.train,
                capture=self._recipe.capture,
                is_capture_asked=is_capture_asked,
                start=start,
                device=self._processes.device,
                needs_weights=needs_weights,
                progress=self._progress,
            )

    def plan(self, *, is_timed: bool) -> "TrainPlan":
        from fledge.features.device_speed import measure_flops
        from fledge.models.placement import pick_dtype
        from fledge.training.train_plan import plan_training

        dtype = pick_dtype(self._recipe.train.dtype, self._processes.device)
        flops_per_s = measure_flops(self._processes.device, dtype) if is_timed else None
        return plan_training(
            self._given, self._recipe.train, itemsize=dtype.itemsize, flops_per_s=flops_per_s
        )

    def show_plan(self, out: Path, *, json: bool) -> None:
        planned, free = self.plan(is_timed=True), free_bytes(out)
        if json:
            print_json({"out": str(out), **asdict(planned), "free_bytes": free})
        else:
            time = "unknown" if planned.seconds is None else f"about {duration(planned.seconds)}"
            print(
                f"reads: {count(planned.samples, 'sample')} and {planned.samples_held_out:,} held "
                f"out, {format_bytes(planned.read_bytes)}\n"
                f"takes: {count(planned.steps, 'step')}, {count(planned.tokens, 'token')}\n"
                f"writes: a head of {count(planned.weights, 'number')}, with its checkpoints about "
                f"{format_bytes(planned.stored_bytes)} into {out} ({format_bytes(free)} free)\n"
                f"memory: about {format_bytes(planned.device_bytes)} on {self._processes.device}\n"
                f"time: {time}, held-out measurements not counted"
            )
        require_disk(out, planned.stored_bytes, "the checkpoints", place="output")

    def train(self, out: Path, *, json: bool) -> None:
        from fledge.training import stage
        from fledge.training.train_plan import needed_disk

        needed = needed_disk(self.plan(is_timed=False), out)
        require_disk(out, needed, "the checkpoints", place="output")
        manifest = stage.train(
            self._given,
            self._recipe.train,
            out,
            processes=self._processes,
            progress=self._progress,
        )
        if self._processes.is_first:
            _show(out, manifest, stage.measure_speed(out), json=json)


def _show(out: Path, manifest: "Manifest", speed: dict[str, Any], *, json: bool) -> None:
    counts = dict(manifest.counts)
    if json:
        target = manifest.plan.identity["target"]
        names = {"out": str(out), "target": target, "fingerprint": manifest.fingerprint}
        print_json({**names, **counts, **speed})
        return
    say(
        f"{count(counts['steps'], 'step')}, {count(counts['tokens'], 'token')}, "
        f"{count(counts['samples'], 'sample')} and {counts['samples_held_out']:,} held out"
    )
    if speed["tokens_per_s"] is not None:
        say(
            f"{speed['tokens_per_s']:,.0f} tokens/s in the median step; "
            f"{speed['data_wait_share']:.1%} of the time went by waiting for data"
        )
    accept_length = counts["best"].get("accept_length")
    if accept_length is not None:
        say(
            f"best on held-out prompts: step {counts['best_step']:,}, accept length "
            f"{accept_length:.2f}"
        )
    print(out)
