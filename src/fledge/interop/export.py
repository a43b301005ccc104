"""`export_head`: a head in the format of another engine, whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.dialects import DIALECTS, Dialect
from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import Progress
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.serve_commands import vllm_command
from fledge.interop.target_facts import TargetFacts, check_belongs, read_target_facts
from fledge.interop.vllm_export import check_vllm, write_vllm
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.store.cache_publish import publish_directory


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """How one engine's format is checked and written."""

    check: Callable[[Eagle3Head, TargetFacts | None], None]
    write: Callable[[Eagle3Head, Path, TargetFacts | None], None]
    command: Callable[[str | None, str, TunedSettings | None], str]


_FORMATS: dict[Dialect, _Format] = {
    "vllm": _Format(check=check_vllm, write=write_vllm, command=vllm_command),
}


def export_head(
    head: str | Path,
    out: Path,
    to: Dialect,
    *,
    target: str | None = None,
    tuned: TunedSettings | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a head as another engine reads it; refuses what that engine would misread."""
    if to not in _FORMATS:
        raise ConfigError(f"the format is {to!r}; it must be one of {', '.join(DIALECTS)}.")
    form = _FORMATS[to]
    loaded = load_head(Path(head))
    facts = None if target is None else read_target_facts(target, progress=progress)
    if facts is not None:
        check_belongs(loaded.config, facts)
    form.check(loaded, facts)
    _refuse_existing(out)
    with publish_directory(out) as staging:
        form.write(loaded, staging, facts)
        _refuse_existing(out)
    return ExportReport(
        directory=out,
        to=to,
        files=tuple(sorted(path.name for path in out.iterdir())),
        serve_command=form.command(target, str(out), tuned),
    )


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ArtifactError(f"{out} exists already; choose another place for the export.")
