"""Where things are in a chart: the frame, its scales, the places of labels and legend."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from fledge.lab.chart import Axis, Chart

WIDTH = 460.0
_HEIGHT = 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 14.0, 30.0, 44.0
_ROW = 17.0
LETTER = 6.3
"""Width of a letter, about: nobody measures text here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The inside of a chart, in units of its viewBox."""

    x: Axis
    y: Axis
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    top: float
    bottom: float
    height: float
    legend_spots: Sequence[tuple[float, float]]
    has_turned_labels: bool
    left: float = _LEFT
    right: float = WIDTH - _RIGHT

    @property
    def category_width(self) -> float:
        return (self.right - self.left) / max(1, len(self.x.categories))

    def x_at(self, value: float) -> float:
        if self.x.categories:
            return self.left + (value + 0.5) * self.category_width
        share = _share(value, self.x_ticks[0], self.x_ticks[-1], is_log=self.x.scale == "log")
        return self.left + share * (self.right - self.left)

    def y_at(self, value: float) -> float:
        share = _share(value, self.y_ticks[0], self.y_ticks[-1], is_log=self.y.scale == "log")
        return self.bottom - max(-0.02, min(1.02, share)) * (self.bottom - self.top)

    def x_labels(self, label: Callable[[float], str]) -> Iterator[tuple[float, str, bool]]:
        """Places and texts below the axis, and whether they are turned to fit."""
        if self.x.categories:
            for place, name in enumerate(self.x.categories):
                shown = name if len(name) <= 22 else name[:21] + "…"
                yield self.x_at(place), shown, self.has_turned_labels
            return
        texts = [label(tick) for tick in self.x_ticks]
        room = (self.right - self.left) / max(1, len(texts))
        every = max(1, math.ceil((max(map(len, texts)) + 1) * LETTER / room))
        for place, (tick, text) in enumerate(zip(self.x_ticks, texts, strict=True)):
            if place % every == 0:
                yield self.x_at(tick), text, False


def make_frame(
    *,
    x: Axis,
    y: Axis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    legend: Sequence[str],
) -> Frame:
    """Room for the legend above and for labels below, the drawing between."""
    spots, num_rows = _lay_out(legend)
    longest = max((min(len(name), 22) for name in x.categories), default=0)
    room = (WIDTH - _LEFT - _RIGHT) / max(1, len(x.categories))
    is_turned = bool(x.categories) and longest * LETTER > room
    extra = min(70.0, longest * LETTER * 0.55) if is_turned else 0.0
    top = _TOP + num_rows * _ROW
    height = _HEIGHT + num_rows * _ROW + extra
    return Frame(
        x=x,
        y=y,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        top=top,
        bottom=height - _BOTTOM - extra,
        height=height,
        legend_spots=spots,
        has_turned_labels=is_turned,
    )


def _lay_out(names: Sequence[str]) -> tuple[list[tuple[float, float]], int]:
    """Places of the legend's entries, in as many rows as they need."""
    spots: list[tuple[float, float]] = []
    x, row = 8.0, 0
    for name in names:
        width = 30 + len(name) * LETTER
        if x > 8.0 and x + width > WIDTH:
            x, row = 8.0, row + 1
        spots.append((x, 12 + row * _ROW))
        x += width
    return spots, row + 1 if names else 0


def _share(value: float, low: float, high: float, *, is_log: bool) -> float:
    if is_log:
        value, low, high = math.log(max(value, 1e-12)), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 0.5


def wrap(chart: Chart, body: str, height: float) -> str:
    """An image with a title and a description."""
    name = escape(chart.name, quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(chart.title)}</title>'
        f'<desc id="{name}-d">{escape(chart.reading)}</desc>{body}</svg>'
    )
