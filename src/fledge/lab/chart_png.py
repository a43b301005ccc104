"""Charts as PNG files, by matplotlib: for slides and for those who cannot open the page."""

import io
from typing import Any

from fledge.lab.chart import Chart, Series, axis_ticks, number, spot_values, tick_label

_COLOURS = ("#0b6fa4", "#d9480f", "#2b8a3e", "#9c36b5", "#a07800", "#c2255c")
_PLAIN, _INK = "#7a8594", "#1c2430"
_MARKERS = "osD^"


def draw_png(chart: Chart) -> bytes:
    """The picture, without a display."""
    # The figure's own class, not pyplot: no display is looked for and nothing stays in memory.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(chart.title, fontsize=12, fontweight="bold", color=_INK, loc="left")
    axes.set_xlabel(chart.x.label)
    axes.set_ylabel(chart.y.label)
    if chart.kind == "heat":
        _draw_cells(axes, chart)
    else:
        draw = {"lines": _draw_lines, "scatter": _draw_spots, "bars": _draw_bars}[chart.kind]
        draw(axes, chart)
        _finish(axes, chart)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    return picture.getvalue()


def _colour(chart: Chart, series: Series) -> str:
    coloured = [one for one in chart.series if not one.is_plain]
    return _PLAIN if series.is_plain else _COLOURS[coloured.index(series) % len(_COLOURS)]


def _draw_lines(axes: Any, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        colour = _colour(chart, series)
        spots = series.spots
        ends = [spot for spot in spots if spot.low is not None]
        axes.fill_between(
            [spot.x for spot in ends],
            [spot.low for spot in ends],
            [spot.high for spot in ends],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            [spot.x for spot in spots],
            [spot.y for spot in spots],
            color=colour,
            alpha=0.4 if series.is_faint else 1.0,
            linestyle="--" if series.is_plain else "-",
            marker=_MARKERS[place % len(_MARKERS)] if len(spots) <= 40 else "",
            markersize=5,
            label=series.name,
        )


def _draw_spots(axes: Any, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        xs, ys = [spot.x for spot in series.spots], [spot.y for spot in series.spots]
        if series.is_faint:
            axes.plot(xs, ys, color=_PLAIN, linestyle="--", linewidth=1, label=series.name)
            continue
        colour = _colour(chart, series)
        if series.is_joined:
            axes.plot(xs, ys, color=colour, linewidth=1)
        known = [spot for spot in series.spots if spot.low is not None and spot.high is not None]
        axes.vlines(
            [spot.x for spot in known],
            [spot.low for spot in known],
            [spot.high for spot in known],
            color=colour,
            linewidth=1,
            alpha=0.6,
        )
        axes.scatter(
            xs, ys, color=colour, marker=_MARKERS[place % len(_MARKERS)], label=series.name
        )
        for spot in series.spots:
            axes.annotate(
                spot.label, (spot.x, spot.y), fontsize=7, xytext=(5, 4), textcoords="offset points"
            )


def _draw_bars(axes: Any, chart: Chart) -> None:
    width = 0.78 / max(1, len(chart.series))
    for place, series in enumerate(chart.series):
        shift = (place - (len(chart.series) - 1) / 2) * width
        places = [spot.x + shift for spot in series.spots]
        colour = _colour(chart, series)
        heights = [spot.y for spot in series.spots]
        axes.bar(places, heights, width=width * 0.9, color=colour, label=series.name)
        for x, spot in zip(places, series.spots, strict=True):
            if spot.low is not None and spot.high is not None:
                axes.vlines(x, spot.low, spot.high, color=_INK, linewidth=1)


def _draw_cells(axes: Any, chart: Chart) -> None:
    columns = len(chart.x.categories)
    grid = [[float("nan")] * columns for _ in chart.series]
    for row, series in enumerate(chart.series):
        for spot in series.spots:
            grid[row][int(spot.x)] = spot.y
            axes.text(spot.x, row, number(spot.y), ha="center", va="center", fontsize=8)
    axes.imshow(grid, cmap="Blues", aspect="auto", alpha=0.7)
    axes.set_xticks(range(columns), chart.x.categories)
    axes.set_yticks(range(len(chart.series)), [series.name for series in chart.series])


def _finish(axes: Any, chart: Chart) -> None:
    """Scales, marks and the legend, as on the page."""
    xs, ys = spot_values(chart)
    if chart.x.categories:
        names = list(chart.x.categories)
        turn = 30 if sum(map(len, names)) > 60 else 0
        axes.set_xticks(range(len(names)), names, rotation=turn, ha="right" if turn else "center")
    elif chart.x.scale == "log":
        ticks = axis_ticks(chart.x, xs)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [tick_label(tick) for tick in ticks])
        axes.minorticks_off()
    if chart.y.scale == "log":
        axes.set_yscale("log")
        axes.minorticks_off()
    ticks = axis_ticks(chart.y, [*ys, 0.0] if chart.kind == "bars" else ys)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks, [tick_label(tick, is_percent=chart.y.is_percent) for tick in ticks])
    for mark in chart.marks:
        line = axes.axhline if mark.along == "y" else axes.axvline
        line(mark.at, color=_INK, linewidth=0.9, linestyle=":", label=mark.label)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) + len(chart.marks) > 1:
        axes.legend(fontsize=8, frameon=False)
