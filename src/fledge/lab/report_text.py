"""Small texts that all parts of a report share."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.lab.chart import Axis, Series, number
from fledge.lab.report_sources import Source


def interval_text(interval: Mapping[str, Any] | None, *, scale: float = 1.0) -> str:
    """`1.84 (1.70 to 1.99)`"""
    if interval is None:
        return "–"
    text = number(interval["value"] * scale)
    if interval["low"] is None:
        return text
    return f"{text} ({number(interval['low'] * scale)} to {number(interval['high'] * scale)})"


def prefixed(title: str, source: Source, sources: Sequence[Source]) -> str:
    """The title, with the source's name where there are several."""
    return title if len(sources) == 1 else f"{title}: {source.name}"


def depth_axis(series: Sequence[Series]) -> Axis:
    """Depths from 1 on; spots count from 0."""
    most = max((len(one.spots) for one in series), default=0)
    return Axis(label="depth", categories=tuple(str(depth) for depth in range(1, most + 1)))
