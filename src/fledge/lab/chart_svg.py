"""Charts as inline SVG whose colours follow the page, light or dark.

Series differ by colour and by the shape of their points. Every point says its figures when it is
pointed at; the whole has a title and a description for those who do not see it.
"""

from collections.abc import Callable, Sequence
from html import escape

from fledge.lab.chart import (
    Chart,
    Mark,
    Series,
    Spot,
    axis_ticks,
    number,
    spot_values,
    tick_label,
)
from fledge.lab.chart_frame import Frame, make_frame, wrap
from fledge.lab.chart_heat import draw_heat
from fledge.lab.chart_tags import place_tags

NUM_COLOURS = 6
_DOT = 3.6


def draw_svg(chart: Chart) -> str:
    """The chart as one `<svg>`."""
    if chart.kind == "heat":
        return draw_heat(chart)
    frame = _frame_of(chart)
    draw = {"lines": _lines, "scatter": _scatter, "bars": _bars}[chart.kind]
    body = [
        *_grid(chart, frame),
        *draw(chart, frame),
        *_marks(chart, frame),
        *_legend(chart, frame),
    ]
    return wrap(chart, "".join(body), frame.height)


def _frame_of(chart: Chart) -> Frame:
    xs, ys = spot_values(chart)
    xs += [mark.at for mark in chart.marks if mark.along == "x"]
    if chart.kind == "bars":
        ys.append(0.0)
    return make_frame(
        x=chart.x,
        y=chart.y,
        x_ticks=[] if chart.x.categories else axis_ticks(chart.x, xs),
        y_ticks=axis_ticks(chart.y, ys),
        legend=[series.name for series in _named(chart)],
    )


def _named(chart: Chart) -> list[Series]:
    """Series that need a legend: a single one is named by the title."""
    named = [series for series in chart.series if series.name and series.spots]
    return named if len(named) > 1 else []


def style(chart: Chart, series: Series) -> tuple[str, int]:
    """The class and the shape of a series."""
    coloured = [one for one in chart.series if not one.is_plain]
    place = 0 if series.is_plain else coloured.index(series) + 1
    colour = "plain" if series.is_plain else f"s{(place - 1) % NUM_COLOURS + 1}"
    return f"{colour} faint" if series.is_faint else colour, place


def _grid(chart: Chart, frame: Frame) -> list[str]:
    parts = []
    for tick in frame.y_ticks:
        y = frame.y_at(tick)
        label = tick_label(tick, is_percent=chart.y.is_percent)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">'
            f"{label}</text>"
        )
    for x, label, turn in frame.x_labels(lambda tick: tick_label(tick)):
        spot = f'x="{x:.1f}" y="{frame.bottom + 16:.1f}"'
        how = f' text-anchor="end" transform="rotate(-32 {x:.1f} {frame.bottom + 12:.1f})"'
        anchor = how if turn else ' text-anchor="middle"'
        parts.append(f'<text class="tick" {spot}{anchor}>{escape(label)}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(f'<path class="axis" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>')
    parts.append(
        f'<text class="name" x="{middle:.1f}" y="{frame.height - 6:.1f}" text-anchor="middle">'
        f"{escape(chart.x.label)}</text>"
    )
    parts.append(
        f'<text class="name" x="{frame.left - 40:.1f}" y="{frame.top - 12:.1f}">'
        f"{escape(chart.y.label)}</text>"
    )
    return parts


def _marks(chart: Chart, frame: Frame) -> list[str]:
    """Lines across; names of upright ones stand below each other, since they may be near."""
    upright = [mark for mark in chart.marks if mark.along == "x"]
    return [
        _mark(mark, frame, row=upright.index(mark) if mark in upright else 0)
        for mark in chart.marks
    ]


def _mark(mark: Mark, frame: Frame, *, row: int) -> str:
    if mark.along == "y":
        y = frame.y_at(mark.at)
        return (
            f'<path class="mark" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
            f'<text class="mark" x="{frame.right:.1f}" y="{y - 5:.1f}" text-anchor="end">'
            f"{escape(mark.label)}</text>"
        )
    x = frame.x_at(mark.at)
    is_right = x > (frame.left + frame.right) / 2
    place = f'x="{x - 5:.1f}" text-anchor="end"' if is_right else f'x="{x + 5:.1f}"'
    return (
        f'<path class="mark" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>'
        f'<text class="mark" {place} y="{frame.top + 10 + 14 * row:.1f}">'
        f"{escape(mark.label)}</text>"
    )


def _lines(chart: Chart, frame: Frame) -> list[str]:
    parts = []
    for series in chart.series:
        css, place = style(chart, series)
        spots = series.spots
        ends = [spot for spot in spots if spot.low is not None and spot.high is not None]
        if len(ends) > 1:
            there = [f"{frame.x_at(s.x):.1f} {frame.y_at(s.high or 0):.1f}" for s in ends]
            back = [f"{frame.x_at(s.x):.1f} {frame.y_at(s.low or 0):.1f}" for s in reversed(ends)]
            parts.append(f'<path class="band {css}" d="M{"L".join([*there, *back])}Z"/>')
        path = "L".join(f"{frame.x_at(spot.x):.1f} {frame.y_at(spot.y):.1f}" for spot in spots)
        if path:
            parts.append(f'<path class="line {css}" d="M{path}"/>')
        if len(spots) <= 40 and not series.is_faint:
            parts += [_dot(chart, frame, series, spot, css, place) for spot in spots]
    return parts


def _scatter(chart: Chart, frame: Frame) -> list[str]:
    parts = []
    named: list[tuple[float, float, str]] = []
    for series in chart.series:
        css, place = style(chart, series)
        if series.is_faint:  # a trend, not a measurement
            path = "L".join(f"{frame.x_at(s.x):.1f} {frame.y_at(s.y):.1f}" for s in series.spots)
            parts.append(f'<path class="trend" d="M{path}"/>')
            continue
        if series.is_joined:
            path = "L".join(f"{frame.x_at(s.x):.1f} {frame.y_at(s.y):.1f}" for s in series.spots)
            parts.append(f'<path class="line {css}" d="M{path}"/>')
        for spot in series.spots:
            x, y = frame.x_at(spot.x), frame.y_at(spot.y)
            parts.append(_whisker(frame, spot, x, css))
            parts.append(_dot(chart, frame, series, spot, css, place))
            if spot.label:
                named.append((x, y, spot.label))
    for tag in place_tags(named, frame):
        anchor = "end" if tag.is_left else "start"
        parts.append(
            f'<text class="tag" x="{tag.x:.1f}" y="{tag.y:.1f}" text-anchor="{anchor}">'
            f"{escape(tag.text)}</text>"
        )
    return parts


def _bars(chart: Chart, frame: Frame) -> list[str]:
    """Groups of bars, one group for each category."""
    parts = []
    count = max(1, len(chart.series))
    group = frame.category_width * 0.78
    width = min(group / count, 34.0)
    floor = frame.y_at(max(0.0, frame.y_ticks[0]))
    for index, series in enumerate(chart.series):
        css, _ = style(chart, series)
        for spot in series.spots:
            middle = frame.x_at(spot.x) + (index - (count - 1) / 2) * width
            top = frame.y_at(spot.y)
            parts.append(
                f'<rect class="bar {css}" x="{middle - width * 0.44:.1f}" '
                f'y="{min(top, floor):.1f}" width="{width * 0.88:.1f}" '
                f'height="{abs(floor - top):.1f}" rx="1.5">'
                f"<title>{escape(_said(chart, series, spot))}</title></rect>"
            )
            parts.append(_whisker(frame, spot, middle, "ink"))
    return parts


def _whisker(frame: Frame, spot: Spot, x: float, css: str) -> str:
    if spot.low is None or spot.high is None:
        return ""
    low, high = frame.y_at(spot.low), frame.y_at(spot.high)
    return f'<path class="whisker {css}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'


def _dot(chart: Chart, frame: Frame, series: Series, spot: Spot, css: str, place: int) -> str:
    shape = _shape(frame.x_at(spot.x), frame.y_at(spot.y), place)
    said = escape(_said(chart, series, spot))
    return f'<path class="dot {css}" d="{shape}"><title>{said}</title></path>'


def _shape(x: float, y: float, place: int) -> str:
    """A circle, a square, a triangle or a diamond."""
    r = _DOT
    shapes: Sequence[Callable[[], str]] = (
        lambda: f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z",
        lambda: f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}Z",
        lambda: f"M{x:.1f} {y - 1.3 * r:.1f}l{1.2 * r:.1f} {2.2 * r:.1f}h{-2.4 * r:.1f}Z",
        lambda: (
            f"M{x:.1f} {y - 1.4 * r:.1f}l{1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} "
            f"{1.4 * r:.1f}l{-1.3 * r:.1f} {-1.4 * r:.1f}Z"
        ),
    )
    return shapes[place % len(shapes)]()


def _said(chart: Chart, series: Series, spot: Spot) -> str:
    """`head, 8: 1,234 (1,200 to 1,270)`"""
    where = spot.label
    if not where:
        is_named = chart.x.categories and 0 <= int(spot.x) < len(chart.x.categories)
        where = chart.x.categories[int(spot.x)] if is_named else number(spot.x)
    what = number(spot.y)
    if spot.low is not None:
        what += f" ({number(spot.low)} to {number(spot.high)})"
    said = f"{chart.x.label} {where}" if not (spot.label or chart.x.categories) else where
    return ", ".join(part for part in (series.name, said) if part) + f": {what}"


def _legend(chart: Chart, frame: Frame) -> list[str]:
    parts = []
    for series, (x, y) in zip(_named(chart), frame.legend_spots, strict=True):
        css, place = style(chart, series)
        if chart.kind == "bars":
            parts.append(
                f'<rect class="bar {css}" x="{x:.1f}" y="{y - 8:.1f}" width="10" height="9" '
                'rx="1.5"/>'
            )
        elif series.is_faint:
            line = "trend" if chart.kind == "scatter" else f"line {css}"
            parts.append(f'<path class="{line}" d="M{x - 2:.1f} {y - 4:.1f}h14"/>')
        else:
            parts.append(f'<path class="dot {css}" d="{_shape(x + 5, y - 4, place)}"/>')
        parts.append(
            f'<text class="tick" x="{x + 16:.1f}" y="{y:.1f}">{escape(series.name)}</text>'
        )
    return parts
