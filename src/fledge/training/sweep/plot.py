"""Accept length over each setting that was varied, and over the measurements of each trial."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fledge.contracts.sweep_settings import KnobRange, SweepSettings
from fledge.store.cache_publish import publish_file
from fledge.training.sweep.trials import Result, Trial

_COLUMNS = 3
_FINISHED, _STOPPED, _BEST = "#0f766e", "#b8a24a", "#c2410c"


def draw_sweep(path: Path, settings: SweepSettings, trials: Sequence[Trial]) -> None:
    """One panel for each setting, one for the courses; trials without a score are left out."""
    from matplotlib.figure import Figure

    shown = [
        (trial, trial.result)
        for trial in trials
        if trial.result is not None and trial.result.score is not None
    ]
    names = list(settings.knobs)
    columns = min(_COLUMNS, len(names) + 1)
    lines = math.ceil((len(names) + 1) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.7 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        _draw_knob(axes, settings, name, shown)
    _draw_courses(panels[len(names)], shown)
    for axes in panels[len(names) + 1 :]:
        axes.set_visible(False)
    for axes in panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_ylabel("accept length", fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    publish_file(path, png.getvalue())


def _draw_knob(
    axes: Any, settings: SweepSettings, name: str, shown: Sequence[tuple[Trial, Result]]
) -> None:
    axes.set_title(name, fontsize=9)
    knob = settings.knobs[name]
    places = {}
    if isinstance(knob, KnobRange):
        if knob.log:
            axes.set_xscale("log")
    else:
        # Evenly, since values may be texts or differ by orders; numbers ascend.
        is_numeric = all(isinstance(value, int | float) for value in knob)
        ordered = sorted(knob) if is_numeric else list(knob)
        places = {str(value): place for place, value in enumerate(ordered)}
        axes.set_xticks(range(len(knob)), [_tick(value) for value in ordered])
        axes.set_xlim(-0.5, len(knob) - 0.5)
        _draw_means(axes, name, places, shown)
    best = max((result.score or 0.0 for _, result in shown), default=None)
    for trial, result in shown:
        value = trial.values[name]
        colour = _STOPPED if result.state == "stopped" else _FINISHED
        axes.plot(
            places.get(str(value), value),
            result.score,
            marker="*" if result.score == best else "o",
            color=_BEST if result.score == best else colour,
            markersize=11 if result.score == best else 5,
            alpha=0.85,
            linestyle="",
        )


def _draw_means(
    axes: Any, name: str, places: dict[str, int], shown: Sequence[tuple[Trial, Result]]
) -> None:
    """A line through the means of the trials that ran to their end."""
    scores: dict[int, list[float]] = {}
    for trial, result in shown:
        if result.state == "finished" and result.score is not None:
            scores.setdefault(places[str(trial.values[name])], []).append(result.score)
    means = sorted((place, sum(found) / len(found)) for place, found in scores.items())
    if len(means) > 1:
        axes.plot(*zip(*means, strict=True), color=_FINISHED, alpha=0.4, linewidth=1.2)


def _draw_courses(axes: Any, shown: Sequence[tuple[Trial, Result]]) -> None:
    axes.set_title("course of each trial", fontsize=9)
    axes.set_xlabel("measurement", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    best = max((result.score or 0.0 for _, result in shown), default=None)
    for _, result in shown:
        is_best = result.score == best
        colour = _STOPPED if result.state == "stopped" else _FINISHED
        axes.plot(
            range(1, len(result.scores) + 1),
            result.scores,
            color=_BEST if is_best else colour,
            linewidth=1.8 if is_best else 1.0,
            alpha=1.0 if is_best else 0.6,
            marker="o" if len(result.scores) == 1 else "",
        )
    labels = (("best", _BEST), ("finished", _FINISHED), ("given up", _STOPPED))
    for label, colour in labels:
        axes.plot([], [], color=colour, label=label)
    axes.legend(fontsize=7.5, frameon=False)


def _tick(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
