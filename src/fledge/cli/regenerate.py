"""`fledge regenerate`: the target answers conversations again."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.drafting import choose_drafting
from fledge.cli.loading import Choice, load
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json, say
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.recipe import Recipe, load_recipe
from fledge.contracts.settings import NO_HEAD
from fledge.store.capacity import format_bytes, free_bytes, require_disk
from fledge.store.manifest import CONVERSATIONS, read_input

if TYPE_CHECKING:
    from fledge.data.regenerate.stage import Answerer, Preview
    from fledge.store.manifest import Manifest

_BY_URL = "By URL"

ConversationsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONVERSATIONS",
        help="What to answer: a directory that `fledge prepare` made.",
        show_default=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="An OpenAI-compatible server, such as http://localhost:8000/v1; "
        "without it the target runs in this process.",
        rich_help_panel=_BY_URL,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The target's name there; by default the first that the server lists.",
        rich_help_panel=_BY_URL,
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="VARIABLE",
        help="Environment variable that holds the key; by default OPENAI_API_KEY, if it is set.",
        rich_help_panel=_BY_URL,
    ),
]
BatchOption = Annotated[
    bool,
    typer.Option(
        "--batch",
        help="Hand the questions in as files and wait (/v1/files and /v1/batches).",
        rich_help_panel=_BY_URL,
    ),
]
GiveUpOption = Annotated[
    bool,
    typer.Option(
        "--give-up",
        help="Finish without rows that a working server does not answer; they count as failed.",
        rich_help_panel=_BY_URL,
    ),
]
OwnTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model to run in this process; by default that of the recipe.",
        rich_help_panel="In this process",
    ),
]


def regenerate(
    conversations: ConversationsArgument,
    out: options.OutOption,
    url: UrlOption = None,
    model: ModelOption = None,
    api_key_env: KeyOption = None,
    batch: BatchOption = False,
    give_up: GiveUpOption = False,
    target: OwnTargetOption = None,
    head: options.HeadOption = NO_HEAD,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    recipe: options.RecipeOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Have the target answer conversations again.

    Drops the last assistant turn of each, or every one, and asks the target instead: here, or
    through a URL. Interrupted, the same command goes on where it stopped.

    Example: [cyan]fledge regenerate data/tiny --out answers/tiny --url http://localhost:8000/v1[/cyan]

    In this process: [cyan]fledge regenerate data/tiny --out answers/tiny[/cyan]

    One JSON document comes with --json: out, model, fingerprint, rows_in, rows, answers, failed,
    dropped, cut_short, finish_reasons, temperatures. With --plan as well: rows, rows_done,
    rows_to_ask, questions, needed_bytes, free_bytes, is_finished.
    """
    from fledge.data.regenerate import stage

    chosen = load_recipe(recipe, assignments or ())
    settings = chosen.regenerate
    progress = terminal_progress()
    if plan:
        _show_plan(stage.preview(conversations, out, settings, progress=progress), out, json=json)
        return
    # Before a target is loaded or a server asked: a wrong path should cost nothing.
    read_input(conversations, CONVERSATIONS)
    if url is None:
        for name, given in (("--model", model), ("--api-key-env", api_key_env), ("--batch", batch)):
            if given:
                raise ConfigError(f"{name} goes with --url, and no URL was given.")
        drafting = choose_drafting(
            head,
            target=target or chosen.target,
        )
        choice = drafting.choice(
            target or chosen.target,
            dtype=dtype,
            device=device,
            max_requests=settings.concurrency,
            cache_tokens=settings.cache_tokens,
        )
        answerer = _in_process(choice, chosen)
    else:
        if target is not None:
            raise ConfigError("--url and --target exclude each other; --model names what is asked.")
        answerer = _by_url(url, model, api_key_env, chosen, progress, batch=batch)
    manifest = stage.regenerate(
        conversations, out, settings, answerer, progress=progress, give_up=give_up
    )
    _show(out, answerer.model, manifest, json=json)


def _in_process(choice: Choice, recipe: Recipe) -> "Answerer":
    loaded = load(choice)
    from fledge.data.regenerate.in_process import EngineAnswerer

    loaded.engine.capture_ahead(terminal_progress())
    return EngineAnswerer(loaded.engine, choice.target, recipe.regenerate)


def _by_url(
    url: str,
    model: str | None,
    api_key_env: str | None,
    recipe: Recipe,
    progress: Progress,
    *,
    batch: bool,
) -> "Answerer":
    from fledge.data.regenerate.batch_answerer import BatchAnswerer
    from fledge.data.regenerate.endpoint import Endpoint, read_api_key
    from fledge.data.regenerate.url_answerer import UrlAnswerer, find_model

    endpoint = Endpoint.parse(url, read_api_key(api_key_env))
    settings = recipe.regenerate
    name = model or find_model(endpoint, settings, progress)
    way = BatchAnswerer if batch else UrlAnswerer
    return way(endpoint, name, settings, progress)


def _show_plan(preview: "Preview", out: Path, *, json: bool) -> None:
    free = free_bytes(out)
    if json:
        print_json({"out": str(out), **asdict(preview), "free_bytes": free})
    else:
        questions, rows = count(preview.questions, "question"), count(preview.rows_to_ask, "row")
        print(
            f"reads: {count(preview.rows, 'row')}, {preview.rows_done:,} of them answered before\n"
            f"asks: {questions} about {rows}\n"
            f"writes: about {format_bytes(preview.needed_bytes)} into {out} "
            f"({format_bytes(free)} free), the journal included"
        )
    require_disk(out, preview.needed_bytes, "the answers", place="output")


def _show(out: Path, model: str, manifest: "Manifest", *, json: bool) -> None:
    counts: dict[str, Any] = dict(manifest.counts)
    if json:
        print_json({"out": str(out), "model": model, "fingerprint": manifest.fingerprint, **counts})
        return
    say(f"{count(counts['rows'], 'row')} with {count(counts['answers'], 'answer')} in {out}")
    for reason, number in counts["dropped"].items():
        say(f"{count(number, 'row')} left out: {reason}")
    if counts["failed"]:
        say(f"{count(counts['failed'], 'row')} without an answer; {out / 'failed.jsonl'} says why")
    print(out)
