"""What a sweep found: one table, as JSON and Markdown, and one plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fledge.contracts.sweep_settings import SweepSettings
from fledge.data.markdown_table import render_table
from fledge.store.cache_publish import publish_file
from fledge.store.manifest import write_json
from fledge.training.sweep.plot import draw_sweep
from fledge.training.sweep.space import short_name
from fledge.training.sweep.trials import Trial

TABLE_NAME, PAGE_NAME, PLOT_NAME = "sweep.json", "sweep.md", "sweep.png"


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Best accept length first; those that failed last."""

    def key(trial: Trial) -> tuple[bool, float, int]:
        result = trial.result
        score = None if result is None or result.state == "failed" else result.score
        return score is None, -(score or 0.0), trial.number

    return sorted(trials, key=key)


def summarise(settings: SweepSettings, trials: Sequence[Trial], out: Path) -> dict[str, Any]:
    """The table as a document."""
    rows = []
    for place, trial in enumerate(rank(trials), start=1):
        result = trial.result
        assert result is not None, "every trial has ended"
        rows.append(
            {
                "rank": place,
                "trial": trial.number,
                "values": dict(trial.values),
                "state": result.state,
                "accept_length": result.score,
                "best_step": result.best_step,
                "steps": result.steps,
                "planned_steps": result.planned_steps,
                "loss": result.loss,
                "ideal_speed_up": result.ideal_speed_up,
                "error": result.error,
                "run": str(trial.run.relative_to(out)),
            }
        )
    return {"method": settings.method, "knobs": list(settings.knobs), "trials": rows}


def read_report(out: Path) -> dict[str, Any]:
    """The table of a finished sweep."""
    return dict(json.loads((out / TABLE_NAME).read_bytes()))


def table_of(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows for people."""
    knobs = document["knobs"]
    heads = [
        "rank",
        "trial",
        *map(short_name, knobs),
        "accept length",
        "ideal",
        "loss",
        "best step",
    ]
    rows = []
    for row in document["trials"]:
        values = [_shown(row["values"][name]) for name in knobs]
        steps = f"{row['best_step']} of {row['steps']}" if row["best_step"] else str(row["steps"])
        figures = [
            "" if row[name] is None else f"{row[name]:.3f}"
            for name in ("accept_length", "ideal_speed_up", "loss")
        ]
        if row["state"] == "failed":
            figures[0] = "failed"
        elif row["state"] == "stopped":
            steps += " (given up)"
        rows.append([str(row["rank"]), str(row["trial"]), *values, *figures, steps])
    return heads, rows


def write_table(out: Path, settings: SweepSettings, trials: Sequence[Trial]) -> list[Path]:
    """The table of the trials that have ended so far; returns the files."""
    document = summarise(settings, trials, out)
    heads, rows = table_of(document)
    errors = [
        f"- trial {row['trial']}: {row['error']}" for row in document["trials"] if row["error"]
    ]
    parts = ["# Sweep", render_table(heads, rows, num_left=0)]
    if errors:
        parts += ["Failed:", "\n".join(errors)]
    write_json(out / TABLE_NAME, document)
    publish_file(out / PAGE_NAME, ("\n\n".join(parts) + "\n").encode())
    return [out / TABLE_NAME, out / PAGE_NAME]


def write_report(out: Path, settings: SweepSettings, trials: Sequence[Trial]) -> list[Path]:
    """Table and plot of a whole sweep; returns the files."""
    draw_sweep(out / PLOT_NAME, settings, trials)
    return [*write_table(out, settings, trials), out / PLOT_NAME]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
