"""Charts as data: drawn as SVG for the page, as PNG for slides, and said as a table for anybody.

A chart is a line chart (figures over a scale, with bands of confidence), a scatter plot, grouped
bars, or a heat map. What is shown is in the data; how it looks is in `chart_svg` and `chart_png`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_SIGHT = 1.4
"""Intervals may reach so many times beyond the largest figure; longer ones are cut off."""

Kind = Literal["lines", "scatter", "bars", "heat"]
Scale = Literal["linear", "log"]


@dataclass(frozen=True, slots=True)
class Spot:
    """One point, with the ends of its interval where they are known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    """What it is called, where it has a name of its own: a head, a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points that belong together."""

    name: str
    spots: Sequence[Spot]
    is_plain: bool = False
    """It is what others are compared with: drawn in grey."""

    is_faint: bool = False
    """It is no measurement of its own: a trend, a bound, what lies behind."""

    is_joined: bool = False
    """Points of a scatter plot that follow one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is measured along one side."""

    label: str
    scale: Scale = "linear"
    includes: tuple[float, ...] = ()
    """Values that must be in sight."""

    categories: tuple[str, ...] = ()
    """Names in place of numbers: x is then the place in this list."""

    is_percent: bool = False
    is_doubling: bool = False
    """Its marks are powers of two, on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the chart, and what it means."""

    along: Literal["x", "y"]
    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Of its file, and of its place on the page."""

    title: str
    reading: str
    """A sentence that says how to read it, or what it shows."""

    kind: Kind
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    heads: Sequence[str] = field(default_factory=tuple)
    rows: Sequence[Sequence[str]] = field(default_factory=tuple)
    """The same as a table."""

    @property
    def has_data(self) -> bool:
        return any(series.spots for series in self.series)


def number(value: float | None, digits: int = 3) -> str:
    """A figure for people: three digits that count, thousands in groups."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(places, 6)}f}"


def tick_label(value: float, *, is_percent: bool = False) -> str:
    """`20k`, `0.5`, `40%`"""
    if is_percent:
        return f"{value * 100:g}%"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divisor = 1e3 if unit == "k" else size
            return f"{value / divisor:g}{unit}"
    return f"{value:g}" if abs(value) < 1000 else f"{value:,.0f}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from just below the lowest to just above the highest."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, count)
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def log_ticks(low: float, high: float, *, is_doubling: bool = False) -> list[float]:
    """Powers of two for what is doubled, otherwise 1, 2, 5, 10 and so on."""
    if is_doubling:
        first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
        return [2.0**power for power in range(first, last + 1)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if last - first <= 2 else (1,)
    found = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    below = max((tick for tick in found if tick <= low), default=found[0])
    above = min((tick for tick in found if tick >= high), default=found[-1])
    return [tick for tick in found if below <= tick <= above]


def axis_ticks(axis: Axis, values: Sequence[float]) -> list[float]:
    """Where an axis has its marks; the first and the last are its ends."""
    known = [*values, *axis.includes] or [0.0, 1.0]
    low, high = min(known), max(known)
    if axis.scale == "log":
        return log_ticks(low, high, is_doubling=axis.is_doubling)
    return nice_ticks(low, high)


def spot_values(chart: Chart) -> tuple[list[float], list[float]]:
    """All x and all y, the ends of intervals included as far as they let the rest be seen."""
    spots = [spot for series in chart.series for spot in series.spots]
    ys = [spot.y for spot in spots]
    furthest = _SIGHT * max(map(abs, ys), default=0.0)
    ends = [end for spot in spots for end in (spot.low, spot.high) if end is not None]
    nearest = min(ys, default=0.0) / _SIGHT if chart.y.scale == "log" else -furthest
    ys += [end for end in ends if nearest <= end <= furthest]
    marks = [mark.at for mark in chart.marks if mark.along == "y"]
    return [spot.x for spot in spots], [*ys, *marks]
