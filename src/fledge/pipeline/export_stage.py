"""The chosen head in the formats of other engines, each in a directory of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

from fledge.contracts.dialects import Dialect
from fledge.contracts.errors import ArtifactError
from fledge.contracts.toml_settings import to_plain
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.export import export_head
from fledge.models.resolve import target_name
from fledge.pipeline.lab_stages import chosen_head, tuned_settings
from fledge.pipeline.road import Forecast, Road
from fledge.store.manifest import EXPORTS, Manifest, Plan, write_json
from fledge.store.stage_directory import open_stage

EXPORTS_NAME = "exports.json"
"""By format: the directory's files and the command that serves them."""


def make_exports(road: Road) -> Manifest:
    """Formats that an interrupted run has written are kept: each appears whole or not at all."""
    head, tuned = chosen_head(road), tuned_settings(road)
    plan = Plan(
        kind=EXPORTS,
        settings={"formats": list(road.recipe.run.exports), "tuned": to_plain(tuned)},
        parents={"head": head.fingerprint},
        identity={"target": target_name(road.target)},
    )
    # A format that cannot be made may be left out of an unfinished directory: every entry says
    # itself what it was made from.
    with open_stage(road.place("export"), plan, has_results=lambda path: False) as stage:
        if stage.is_finished:
            _require_all(road)
            return stage.manifest
        journal = stage.path / EXPORTS_NAME
        before = read_exports(road) if journal.exists() else {}
        source = {"head": head.fingerprint, "tuned": to_plain(tuned)}
        made: dict[str, Any] = {}
        for to in road.recipe.run.exports:
            entry = before.get(to)
            if entry is None or entry.get("source") != source:
                entry = {"source": source, **_export(road, head.directory, to, tuned)}
            made[to] = entry
            write_json(journal, {**before, **made})
        write_json(journal, made)
        return stage.finish(counts={"formats": list(made)}, files=[journal])


def _export(road: Road, head: Path, to: Dialect, tuned: TunedSettings | None) -> dict[str, Any]:
    out = road.place("export") / to
    # What is there was made of another head, or whole but not written down before a kill.
    shutil.rmtree(out, ignore_errors=True)
    with road.progress.task(f"exporting for {to}", unit=""):
        report = export_head(
            head, out, to, target=road.target, tuned=tuned, verify=True, progress=road.progress
        )
    return {
        "files": list(report.files),
        "serve_command": report.serve_command,
        "notes": list(report.notes),
        "checks": list(report.checks),
    }


def forecast_exports(road: Road) -> Forecast:
    return Forecast(work=", ".join(road.recipe.run.exports))


def read_exports(road: Road) -> dict[str, Any]:
    """What was exported, by format."""
    exports: dict[str, Any] = json.loads((road.place("export") / EXPORTS_NAME).read_bytes())
    return exports


def _require_all(road: Road) -> None:
    out = road.place("export")
    for to, entry in read_exports(road).items():
        lost = next((name for name in entry["files"] if not (out / to / name).exists()), None)
        if lost is not None:
            raise ArtifactError(
                f"{out / to / lost} is not there any more; remove {out} and run again."
            )
