"""`fledge prepare`: from sources to clean conversations with a data card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options
from fledge.cli.loading import Choice, load
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, duration, print_json, say
from fledge.cli.worker_options import WorkersOption
from fledge.contracts.data_settings import PrepareSettings, SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.recipe import Recipe, load_recipe, read_recipe
from fledge.store.capacity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fledge.contracts.conversation import Conversation
    from fledge.data.prepare_estimate import PrepareEstimate
    from fledge.data.self_filter import SelfPromptReport
    from fledge.data.self_prompts import SelfPromptWriter
    from fledge.store.manifest import Manifest

_RECIPE_SUFFIX = ".toml"

InputArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE|FILE",
        help="A recipe; or files, directories, patterns, s3://, gs:// or hf:// addresses.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The model that writes prompts for sources with the path `self`; by default that of "
        "the recipe.",
    ),
]
LicenceOption = Annotated[
    str | None,
    typer.Option(
        "--licence", metavar="NAME", help="Licence of the files, when there is no recipe."
    ),
]


def prepare(
    inputs: InputArgument,
    out: options.OutOption,
    licence: LicenceOption = None,
    target: TargetOption = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    workers: WorkersOption = None,
    assignments: options.SetOption = None,
    plan: options.PlanOption = False,
    json: options.JsonOption = False,
) -> None:
    """Read prompts and conversations, clean them, and blend them.

    Removes personal data, duplicates and benchmark prompts as the recipe says, and writes a data
    card beside the rows. Interrupted, the same command goes on where it stopped.

    Example: [cyan]fledge prepare recipes/tiny-cpu.toml --out data/tiny[/cyan]

    Without a recipe: [cyan]fledge prepare prompts.jsonl --licence MIT --out data/mine[/cyan]

    One JSON document comes with --json: out, fingerprint, rows, licences, sources, files; with
    --plan: sources, output_rows, output_bytes, needed_bytes, free_bytes, seconds and more.
    """
    recipe, base = _read(inputs, licence, assignments or [])
    settings = recipe.prepare
    assert settings is not None
    progress = terminal_progress()
    if plan:
        _show_plan(settings, out, base, progress, json=json)
        return
    from fledge.data import prepare as stage

    choice = Choice(
        target=target or recipe.target,
        dtype=dtype,
        device=device,
        settings=recipe.regenerate.engine,
    )

    manifest = stage.prepare(
        settings,
        out,
        target=choice.target,
        self_prompts=_PromptsOfTarget(choice, out / stage.WORK_NAME / "self", progress),
        progress=progress,
        base=base,
        num_workers=workers,
    )
    if json:
        print_json(_document(out, manifest))
    else:
        _show(out, manifest)


def _read(inputs: list[str], licence: str | None, assignments: list[str]) -> tuple[Recipe, Path]:
    """The recipe, and the directory at which its paths start."""
    if any(Path(one).suffix == _RECIPE_SUFFIX for one in inputs):
        if len(inputs) > 1:
            raise ConfigError(
                f"a recipe stands alone; it names its files itself, and here are {len(inputs)} "
                "arguments."
            )
        if licence is not None:
            raise ConfigError("--licence is for files without a recipe; a recipe names its own.")
        path = Path(inputs[0])
        recipe = load_recipe(path, assignments)
        if recipe.prepare is None:
            raise ConfigError(f"the recipe {path} has no [prepare] table; add one with sources.")
        return recipe, path.parent
    if licence is None:
        raise ConfigError("--licence is missing: say under which licence these files may be used.")
    sources = [
        {"name": name, "path": path, "licence": licence}
        for name, path in zip(_names(inputs), inputs, strict=True)
    ]
    return read_recipe({"prepare": {"sources": sources}}, assignments), Path()


def _names(inputs: list[str]) -> list[str]:
    """A name for each input: its last part without endings, numbered where two are the same."""
    names: list[str] = []
    for one in inputs:
        stem = one.rstrip("/").rpartition("/")[2].partition(".")[0].strip("*?[]") or "files"
        same = sum(name == stem or name.startswith(f"{stem}-") for name in names)
        names.append(f"{stem}-{same + 1}" if same else stem)
    return names


class _PromptsOfTarget:
    """Prompts for sources with the path `self`; the target is loaded when the first is wanted."""

    def __init__(self, choice: Choice, journal: Path, progress: Progress) -> None:
        self._choice, self._journal, self._progress = choice, journal, progress
        self._writer: SelfPromptWriter | None = None

    def __call__(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        examples: "Sequence[str]",
    ) -> "Iterable[Conversation]":
        if self._writer is None:
            from fledge.data.self_prompts import SelfPromptWriter

            engine = load(self._choice).engine
            self._journal.mkdir(parents=True, exist_ok=True)
            self._writer = SelfPromptWriter(engine, progress=self._progress, journal=self._journal)
        return self._writer(source, settings, seed, examples)

    def report(self, source_name: str) -> "SelfPromptReport":
        assert self._writer is not None, "no prompt was asked for"
        return self._writer.report(source_name)


def _show(out: Path, manifest: "Manifest") -> None:
    for name, rows in manifest.counts["sources"].items():
        say(f"{name}: {rows['read']:,} read, {rows['kept']:,} kept, {rows['out']:,} in the blend")
    say(f"{count(manifest.counts['rows'], 'conversation')}; the data card is {out / 'card.md'}")
    print(out)


def _document(out: Path, manifest: "Manifest") -> dict[str, Any]:
    return {
        "out": str(out),
        "fingerprint": manifest.fingerprint,
        **manifest.counts,
        "files": dict(manifest.files),
    }


def _show_plan(
    settings: PrepareSettings, out: Path, base: Path, progress: Progress, *, json: bool
) -> None:
    from fledge.data.prepare_estimate import estimate_prepare, require_room

    estimate = estimate_prepare(settings, out, base=base, progress=progress)
    if json:
        print_json({"out": str(out), **estimate.to_json()})
    else:
        print(_describe(estimate))
    require_room(estimate, out)


def _describe(estimate: "PrepareEstimate") -> str:
    lines = []
    for source in estimate.sources:
        lines.append(
            f"{source.name} ({source.licence}): {'' if source.is_exact else 'about '}"
            f"{count(source.rows, 'row')} in {count(source.files, 'file')} of "
            f"{format_bytes(source.stored_bytes)}, about {source.kept:,} kept"
        )
        lines += [f"  {sentence}" for sentence in dict.fromkeys(source.schemas.values())]
    lines += [
        f"index of duplicates: {format_bytes(estimate.index_bytes)} "
        f"({estimate.index_bytes_per_row:,} bytes per row)",
        f"output: about {count(estimate.output_rows, 'row')}, "
        f"{format_bytes(estimate.output_bytes)}",
        f"disk: {format_bytes(estimate.needed_bytes)} needed while it runs, "
        f"{format_bytes(estimate.free_bytes)} free",
        f"time: about {duration(estimate.seconds)}",
    ]
    if any(source.seconds is None for source in estimate.sources):
        lines[-1] += ", and what the target needs to write prompts"
    return "\n".join(lines)
