"""`fledge tokenize`: from answers of the target to a corpus."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, duration, print_json, say
from fledge.cli.worker_options import WorkersOption
from fledge.contracts.recipe import load_recipe
from fledge.data.tokenize_source import read_source
from fledge.store.capacity import format_bytes, free_bytes, require_disk

if TYPE_CHECKING:
    from fledge.data.tokenize_stage import TokenizeEstimate
    from fledge.store.manifest import Manifest

AnswersArgument = Annotated[
    Path,
    typer.Argument(
        metavar="ANSWERS",
        help="A directory that `fledge regenerate` made.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model that answered, by default the recipe's. Only its tokenizer and config "
        "are read.",
    ),
]
AsRecordedOption = Annotated[
    bool,
    typer.Option(
        "--as-recorded",
        help="Loss on every assistant turn, whoever wrote it; ANSWERS may then be a directory "
        "that `fledge prepare` made.",
    ),
]


def tokenize(
    answers: AnswersArgument,
    out: options.OutOption,
    target: TargetOption = None,
    as_recorded: AsRecordedOption = False,
    workers: WorkersOption = None,
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Turn answers into token ids with a loss mask, and choose the draft vocabulary.

    Conversations are rendered by the target's own chat template, with loss on exactly what the
    target said. Interrupted, the same command goes on where it stopped.

    Example: [cyan]fledge tokenize answers/tiny --out corpus/tiny[/cyan]

    With settings: [cyan]fledge tokenize answers/tiny --out corpus/tiny --set
    tokenize.max_tokens=4096[/cyan]

    One JSON document comes with --json: out, target, fingerprint, rows, reasons, turns, samples,
    tokens, loss_tokens, loss_share, lengths, packing, vocabulary, sources and more. With --plan as
    well: rows, source_bytes, tokens, samples, stored_bytes, free_bytes, memory_bytes, seconds.
    """
    chosen = load_recipe(recipe, assignments or ())
    settings = replace(chosen.tokenize, as_recorded=as_recorded or chosen.tokenize.as_recorded)
    progress = terminal_progress()
    # Before the tokenizer: a wrong path should cost nothing.
    read_source(answers, settings)
    with progress.task("reading the tokenizer", unit=""):
        # Importing transformers takes seconds, so it happens while the bar is already there.
        from fledge.data import tokenize_stage as stage

        job = stage.prepare_job(answers, target or chosen.target, settings, progress)
    if plan:
        _show_plan(stage.estimate_job(job, progress), out, json=json)
        return
    _show(out, stage.tokenize(job, out, progress, num_workers=workers), json=json)


def _show_plan(estimate: "TokenizeEstimate", out: Path, *, json: bool) -> None:
    free = free_bytes(out)
    made = f"{count(estimate.samples, 'sample')}, {count(estimate.tokens, 'token')}"
    if json:
        print_json({"out": str(out), **asdict(estimate), "free_bytes": free})
    else:
        print(
            f"reads: {count(estimate.rows, 'row')}, {format_bytes(estimate.source_bytes)}\n"
            f"writes: about {made}, "
            f"{format_bytes(estimate.stored_bytes)} into {out} ({format_bytes(free)} free)\n"
            f"memory: about {format_bytes(estimate.memory_bytes)} beside the tokenizer\n"
            f"time: about {duration(estimate.seconds)}"
        )
    require_disk(out, estimate.stored_bytes, "the corpus", place="output")


def _show(out: Path, manifest: "Manifest", *, json: bool) -> None:
    counts: dict[str, Any] = dict(manifest.counts)
    if json:
        target = manifest.plan.identity["target"]
        names = {"out": str(out), "target": target, "fingerprint": manifest.fingerprint}
        print_json({**names, **counts})
        return
    rows, lengths, vocabulary = counts["rows"], counts["lengths"], counts["vocabulary"]
    samples = count(counts["samples"], "sample")
    model = manifest.plan.identity["answered_by"]
    by_whom = f", answered by {model}," if model else ""
    say(f"{rows['used']:,} of {count(rows['read'], 'row')}{by_whom} gave {samples}")
    for reason, entry in counts["reasons"].items():
        say(f"left out {count(entry['rows'], 'row')}, the first {entry['first_row']}: {reason}")
    if rows["without_answer"]:
        say(f"left out {count(rows['without_answer'], 'row')} in which the target said nothing")
    if counts["samples_looping"]:
        say(
            f"ended {count(counts['samples_looping'], 'sample')} that go round in circles, "
            f"{counts['tokens_looping']:,} tokens earlier (tokenize.keep_loops keeps them)"
        )
    if counts["samples_cut"]:
        say(
            f"cut {count(counts['samples_cut'], 'sample')} by {counts['tokens_cut']:,} tokens; "
            f"{counts['samples_dropped']:,} had nothing of the target's left and were dropped"
        )
    say(
        f"{count(counts['tokens'], 'token')}, {counts['loss_share']:.1%} with loss; a sample has "
        f"{lengths['p50']:,} at the median, {lengths['p99']:,} at the 99th percentile"
    )
    for name, source in counts["sources"].items():
        say(
            f"{name}: {count(source['samples'], 'sample')}, "
            f"{count(source['loss_tokens'], 'token')} with loss, "
            f"{source['vocabulary_coverage']:.2%} of them in the draft vocabulary"
        )
    say(
        f"draft vocabulary of {count(vocabulary['size'], 'token')}: covers "
        f"{vocabulary['coverage']:.2%} of what was said"
    )
    print(out)
