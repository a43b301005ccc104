"""All curves of a run in one picture: `curves.png`, and `curves.html` that needs nothing else.

Drawn from `curves.jsonl` alone, without a display; at a checkpoint this costs about a second,
however long the run is, since long curves are thinned.
"""

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.store.cache_publish import publish_file
from fledge.training.curves import CurveRecord, Kind, read_curves

PLOT_NAME, PAGE_NAME = "curves.png", "curves.html"
_MAX_POINTS = 600
_WIDE = 100
"""Norms that differ by more than this are shown on a logarithmic axis."""

_TRAIN, _HELD_OUT, _REAL = "#7a8ba3", "#c2410c", "#0f766e"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; color: #1c2430 }}
 body {{ margin: 2rem auto; max-width: 84rem; padding: 0 1rem }}
 h1 {{ font-size: 1.3rem }} img {{ width: 100%; height: auto }}
 table {{ border-collapse: collapse }} td {{ padding: .15rem 1.2rem .15rem 0 }}
 td + td {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
<h1>{title}</h1>
<table>{rows}</table>
<img alt="curves" src="data:image/png;base64,{picture}">
</html>
"""


@dataclass(frozen=True, slots=True)
class _Line:
    steps: list[int]
    values: list[float]

    @property
    def last(self) -> float:
        return self.values[-1]


def draw_curves(directory: Path) -> None:
    """Draw what `curves.jsonl` of a run directory holds, over any older picture."""
    records = read_curves(directory, most_steps=_MAX_POINTS)
    picture = _draw(records, title=directory.resolve().name)
    png = io.BytesIO()
    picture.savefig(png, format="png", dpi=130)
    publish_file(directory / PLOT_NAME, png.getvalue())
    publish_file(directory / PAGE_NAME, _page(directory, records, png.getvalue()).encode())


def _draw(records: Sequence[CurveRecord], *, title: str) -> Any:
    # The figure's own class, not pyplot: no display is looked for and nothing stays in memory.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7.4))
    # Set by hand: looking for room for all labels would be half of the work.
    figure.subplots_adjust(left=0.045, right=0.985, top=0.9, bottom=0.07, hspace=0.32, wspace=0.22)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels: tuple[Callable[[Any, Sequence[CurveRecord]], None], ...] = (
        _draw_loss,
        _draw_accuracy,
        _draw_acceptance,
        _draw_lengths,
        _draw_schedule,
        _draw_speed,
    )
    last = max((record.step for record in records), default=1)
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        panel(axes, records)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_xlabel("step", fontsize=8)
        if not axes.has_data():
            axes.text(0.5, 0.5, "not measured yet", ha="center", va="center", color="#7a8ba3")
    return figure


def _draw_loss(axes: Any, records: Sequence[CurveRecord]) -> None:
    axes.set_title("loss", fontsize=10)
    train = _line(records, "train", "loss")
    if train is not None:
        axes.plot(train.steps, train.values, color=_TRAIN, alpha=0.3, linewidth=0.8)
        smooth = _smoothed(train)
        axes.plot(smooth.steps, smooth.values, color=_TRAIN, linewidth=1.6, label="training")
    _plot(axes, _line(records, "held_out", "loss"), "held out", _HELD_OUT)
    _name_lines(axes)


def _draw_accuracy(axes: Any, records: Sequence[CurveRecord]) -> None:
    _draw_depths(axes, records, "accuracy_at_depth", "accuracy")


def _draw_acceptance(axes: Any, records: Sequence[CurveRecord]) -> None:
    _draw_depths(axes, records, "acceptance_at_depth", "acceptance given acceptance before")


def _draw_depths(axes: Any, records: Sequence[CurveRecord], name: str, title: str) -> None:
    """One colour per depth: strong what is held out, faint what is trained on."""
    from matplotlib import colormaps

    depths = max((len(_list(one, name)) for one in records), default=0)
    is_held_out = any(one.kind == "held_out" for one in records)
    axes.set_title(f"{title} ({'strong: held out' if is_held_out else 'training'})", fontsize=10)
    for depth in range(depths):
        colour = colormaps["viridis"](0.9 * depth / max(1, depths - 1))
        train = _line(records, "train", name, depth)
        if train is not None:
            smooth = _smoothed(train)
            axes.plot(smooth.steps, smooth.values, color=colour, alpha=0.35, linewidth=1.0)
        # A line without points still has its place in the legend.
        held_out = _line(records, "held_out", name, depth) or _Line([], [])
        _plot(axes, held_out, f"depth {depth + 1}", colour)
    if depths:
        axes.set_ylim(0, 1.02)
        _name_lines(axes, columns=2)


def _draw_lengths(axes: Any, records: Sequence[CurveRecord]) -> None:
    axes.set_title("tokens per target pass", fontsize=10)
    train = _line(records, "train", "ideal_speed_up")
    if train is not None:
        smooth = _smoothed(train)
        axes.plot(smooth.steps, smooth.values, color=_TRAIN, linewidth=1.2, label="ideal, training")
    _plot(axes, _line(records, "held_out", "ideal_speed_up"), "ideal, held out", _HELD_OUT)
    _plot(axes, _line(records, "decode", "accept_length"), "accept length, decoded", _REAL)
    if axes.has_data():
        axes.axhline(1.0, color="#1c2430", linewidth=0.8, linestyle=":", label="plain decoding")
        axes.set_ylim(bottom=0.9)
    _name_lines(axes)


def _draw_schedule(axes: Any, records: Sequence[CurveRecord]) -> None:
    axes.set_title("learning rate", fontsize=10)
    _plot(axes, _line(records, "train", "learning_rate"), "learning rate", _TRAIN, marker="")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    norms = _line(records, "train", "grad_norm")
    if norms is not None:
        axes.set_title("learning rate (grey), norm of the gradient (red)", fontsize=10)
        other = axes.twinx()
        other.plot(norms.steps, norms.values, color=_HELD_OUT, alpha=0.25, linewidth=0.8)
        smooth = _smoothed(norms)
        other.plot(smooth.steps, smooth.values, color=_HELD_OUT, linewidth=1.2)
        other.tick_params(labelsize=8, colors=_HELD_OUT)
        other.spines["top"].set_visible(False)
        if 0 < _WIDE * min(norms.values) < max(norms.values):
            other.set_yscale("log")
            other.minorticks_off()


def _draw_speed(axes: Any, records: Sequence[CurveRecord]) -> None:
    axes.set_title("tokens/s", fontsize=10)
    line = _line(records, "train", "tokens_per_s")
    if line is not None:
        axes.plot(line.steps, line.values, color=_TRAIN, alpha=0.3, linewidth=0.8)
        smooth = _smoothed(line)
        axes.plot(smooth.steps, smooth.values, color=_TRAIN, linewidth=1.6)
        axes.set_ylim(0, 1.15 * max(line.values))
        is_large = max(line.values) >= 1e5
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value / 1000:,.0f}k" if is_large else f"{value:,.0f}"
        )


def _plot(axes: Any, line: _Line | None, label: str, colour: Any, marker: str = "o") -> None:
    if line is not None:
        axes.plot(
            line.steps,
            line.values,
            color=colour,
            label=label,
            linewidth=1.5,
            marker=marker if len(line.steps) <= 40 else "",
            markersize=3,
        )


def _name_lines(axes: Any, columns: int = 1) -> None:
    if axes.has_data():
        axes.legend(fontsize=7.5, frameon=False, ncols=columns)


def _line(
    records: Sequence[CurveRecord], kind: Kind, name: str, depth: int | None = None
) -> _Line | None:
    """One figure over the steps; None when it was never measured."""
    points = []
    for record in records:
        if record.kind != kind:
            continue
        value = record.figures.get(name, record.timing.get(name))
        if isinstance(value, list):
            value = value[depth] if depth is not None and depth < len(value) else None
        if value is not None:
            points.append((record.step, value))
    if not points:
        return None
    return _Line([step for step, _ in points], [value for _, value in points])


def _smoothed(line: _Line) -> _Line:
    """Means over a window that grows with the curve: noise goes, the course stays."""
    reach = len(line.values) // 40
    means = []
    for middle in range(len(line.values)):
        near = line.values[max(0, middle - reach) : middle + reach + 1]
        means.append(sum(near) / len(near))
    return _Line(line.steps, means)


def _list(record: CurveRecord, name: str) -> list[float | None]:
    value = record.figures.get(name)
    return value if isinstance(value, list) else []


def _page(directory: Path, records: Sequence[CurveRecord], png: bytes) -> str:
    newest: tuple[tuple[str, Kind, str], ...] = (
        ("accept length, decoded", "decode", "accept_length"),
        ("ideal speed-up, held out", "held_out", "ideal_speed_up"),
        ("loss, held out", "held_out", "loss"),
        ("loss, training", "train", "loss"),
        ("tokens/s", "train", "tokens_per_s"),
    )
    rows = [f"<tr><td>step</td><td>{max((one.step for one in records), default=0):,}</td></tr>"]
    for label, kind, name in newest:
        line = _line(records, kind, name)
        if line is not None:
            value = f"{line.last:,.0f}" if line.last >= 1000 else f"{line.last:.3f}"
            rows.append(f"<tr><td>{label}</td><td>{value}</td></tr>")
    picture = base64.b64encode(png).decode()
    title = html.escape(directory.resolve().name)
    return _PAGE.format(title=title, rows="".join(rows), picture=picture)
