"""`export_head`: a head in the format of another engine, whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fledge.contracts.dialects import DIALECTS, Dialect, HeadPrecision
from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.formats import FORMATS, ExportJob
from fledge.interop.gguf_rounding import rounded_head
from fledge.interop.readme import readme_text
from fledge.interop.serve_commands import chain_of, setting_notes
from fledge.interop.target_facts import TargetFacts, check_belongs, read_target_facts
from fledge.interop.target_matrices import with_target_rows
from fledge.interop.verify import verify_export
from fledge.models.head_files import load_head
from fledge.store.cache_publish import publish_directory
from fledge.store.capacity import translated_disk_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written, and how to use it."""

    directory: Path
    to: Dialect
    files: tuple[str, ...]
    """Names below the directory."""

    serve_command: str
    """Serves the target with the head, in that engine."""

    notes: tuple[str, ...] = ()
    """What a user should know: settings that were translated, checks that could not be made."""

    checks: tuple[str, ...] = ()
    """What `verify` read back and found right."""


def export_head(
    head: str | Path,
    out: Path,
    to: Dialect,
    *,
    target: str | None = None,
    tuned: TunedSettings | None = None,
    precision: HeadPrecision | None = None,
    verify: bool = False,
    trial: Callable[[Path], str] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a head as another engine reads it; refuses what that engine would misread.

    `trial` runs what was written before it is kept, and says what it found; it may refuse, too.
    """
    if to not in FORMATS:
        raise ConfigError(f"the format is {to!r}; it must be one of {', '.join(DIALECTS)}.")
    form = FORMATS[to]
    loaded = load_head(Path(head))
    facts = None if target is None else read_target_facts(target, progress=progress)
    if facts is not None:
        check_belongs(loaded.config, facts)
    if loaded.config.turned_rows:
        loaded = with_target_rows(loaded, facts, where=head)
    if precision is not None:
        if to != "gguf":
            raise ConfigError(f"--precision {precision} is for GGUF heads; {to} keeps the head's.")
        loaded = rounded_head(loaded, precision)
    form.check(loaded, facts)
    notes = _notes(to, tuned, facts)
    config = loaded.config
    if facts is not None:
        config = replace(config, taps=config.resolve_taps(facts.num_layers))
    command = form.command(_place(to, facts), str(out), tuned, config)
    job = ExportJob(target=facts, tuned=tuned, progress=progress, precision=precision)
    checks: tuple[str, ...] = ()
    _refuse_existing(out)
    with translated_disk_errors(out, place="head"), publish_directory(out) as staging:
        form.write(loaded, staging, job)
        stored = precision or str(loaded.fc.weight.dtype).removeprefix("torch.")
        text = readme_text(loaded, facts, to, commands=(command,), notes=notes, precision=stored)
        (staging / "README.md").write_text(text, encoding="utf-8")
        if verify:
            checks = verify_export(loaded, staging, facts, form.read)
        if trial is not None:
            checks += (trial(staging),)
        # Publishing replaces what has come to be there while the weights were written.
        _refuse_existing(out)
    return ExportReport(
        directory=out,
        to=to,
        files=tuple(sorted(path.name for path in out.iterdir())),
        serve_command=command,
        notes=notes,
        checks=checks,
    )


def _place(to: Dialect, target: TargetFacts | None) -> str | None:
    """Where the engine finds the target; llama.cpp takes the file that was typed."""
    if target is None:
        return None
    return target.name if to == "gguf" else target.place


def _notes(to: Dialect, tuned: TunedSettings | None, target: TargetFacts | None) -> tuple[str, ...]:
    notes = setting_notes(to, tuned)
    if to == "openvino":
        notes += (
            "then, in Python: LLMPipeline('target-ir', 'CPU', draft_model=draft_model('head-ir', "
            f"'CPU')), and generate with num_assistant_tokens={chain_of(tuned)}.",
        )
    if target is None:
        notes += ("no target was named, so that layers and sizes were not compared with one.",)
    return notes


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ArtifactError(f"{out} exists already; choose another place for the export.")
