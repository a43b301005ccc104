"""A heat map: a series is a row, a spot a cell, its figure written in it."""

from html import escape

from fledge.lab.chart import Chart, Spot, number
from fledge.lab.chart_frame import WIDTH, wrap

_LEFT, _TOP, _RIGHT = 48.0, 30.0, 8.0
_WIDEST, _TALLEST, _LOWEST = 80.0, 32.0, 24.0
NUM_SHADES = 9
"""From the lowest figure to the highest."""


def shade(chart: Chart, spot: Spot) -> int:
    """Which of the shades a figure has, 0 the lowest."""
    values = [one.y for series in chart.series for one in series.spots]
    low, high = min(values), max(values)
    share = (spot.y - low) / (high - low) if high > low else 1.0
    return min(NUM_SHADES - 1, int(share * NUM_SHADES))


def best_spot(chart: Chart) -> Spot | None:
    """The cell with the highest figure."""
    spots = [spot for series in chart.series for spot in series.spots]
    return max(spots, key=lambda spot: spot.y, default=None)


def draw_heat(chart: Chart) -> str:
    """Columns are the x categories, rows the series, the first at the top."""
    columns = chart.x.categories
    wide = min(_WIDEST, (WIDTH - _LEFT - _RIGHT) / max(1, len(columns)))
    tall = min(_TALLEST, max(_LOWEST, wide * 0.7))
    bottom = _TOP + tall * len(chart.series)
    height = bottom + 44
    best = best_spot(chart)
    parts = [_text("name", 8, 18, chart.y.label)]
    for row, series in enumerate(chart.series):
        middle = _TOP + (row + 0.5) * tall
        parts.append(_text("tick", _LEFT - 8, middle + 4, series.name, anchor="end"))
        for spot in series.spots:
            x, y = _LEFT + spot.x * wide, _TOP + row * tall
            level = shade(chart, spot)
            css = f"cell h{level}" + (" best" if spot is best else "")
            where = f"{chart.y.label} {series.name}, {chart.x.label} {columns[int(spot.x)]}"
            parts.append(
                f'<rect class="{css}" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" '
                f'height="{tall - 2:.1f}" rx="2">'
                f"<title>{escape(where)}: {number(spot.y)}</title></rect>"
            )
            ink = "on-dark" if level > NUM_SHADES // 2 else "on-light"
            parts.append(
                _text(f"figure {ink}", x + wide / 2, middle + 4, number(spot.y), anchor="middle")
            )
    for place, name in enumerate(columns):
        parts.append(
            _text("tick", _LEFT + (place + 0.5) * wide, bottom + 16, name, anchor="middle")
        )
    width = wide * len(columns)
    parts.append(_text("name", _LEFT + width / 2, height - 6, chart.x.label, anchor="middle"))
    return wrap(chart, "".join(parts), height)


def _text(css: str, x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
