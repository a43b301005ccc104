"""Charts of training runs, from their curves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.lab.chart import Axis, Chart, Mark, Series, Spot, number
from fledge.lab.report_sources import Source
from fledge.lab.report_text import depth_axis

_MOST_POINTS = 240
Record = Mapping[str, Any]


def train_charts(sources: Sequence[Source]) -> list[Chart]:
    """Tokens per target pass, loss, and acceptance by depth of each run."""
    charts = [
        _compare(sources, "accept-length-while-training", "Accept length while training",
            "accept length, decoded", "decode", "accept_length",
            "Held-out prompts, really decoded at checkpoints.",
            [Mark("y", 1.0, "plain decoding")]),
        _compare(sources, "ideal-speed-up", "Ideal speed-up while training",
            "ideal speed-up, held out", "held_out", "ideal_speed_up",
            "What acceptance would give if drafts and checks cost nothing: an upper bound.", []),
        _losses(sources),
        _acceptance(sources),
    ]  # fmt: skip
    return [chart for chart in charts if chart.has_data]


def curve(source: Source, kind: str, name: str) -> list[Spot]:
    """One figure over the steps; long curves are thinned, the newest point stays."""
    spots = []
    for record in source.document["curves"]:
        value = record["figures"].get(name)
        if record["kind"] == kind and isinstance(value, int | float):
            spots.append(Spot(record["step"], value))
    stride = max(1, -(-len(spots) // _MOST_POINTS))
    return spots[::-stride][::-1]


def _compare(
    sources: Sequence[Source], name: str, title: str, label: str, kind: str, figure: str,
    reading: str, marks: Sequence[Mark],
) -> Chart:  # fmt: skip
    series = [Series(name=source.name, spots=curve(source, kind, figure)) for source in sources]
    return Chart(
        name=name,
        title=title,
        reading=reading,
        kind="lines",
        x=Axis(label="step", includes=(0.0,)),
        y=Axis(label=label, includes=(1.0,)),
        series=series,
        marks=marks,
        **_table(series, label),
    )


def _losses(sources: Sequence[Source]) -> Chart:
    series = []
    for source in sources:
        held_out = curve(source, "held_out", "loss")
        series.append(Series(name=_named(source, sources, "held out"), spots=held_out))
        trained = _smooth(curve(source, "train", "loss"))
        name = _named(source, sources, "training")
        series.append(Series(name=name, spots=trained, is_plain=len(sources) == 1, is_faint=True))
    return Chart(
        name="loss",
        title="Loss",
        reading="It goes on falling after acceptance has peaked, so heads are not chosen by it.",
        kind="lines",
        x=Axis(label="step", includes=(0.0,)),
        y=Axis(label="loss"),
        series=series,
        **_table([one for one in series if not one.is_faint], "loss, held out"),
    )


def _named(source: Source, sources: Sequence[Source], what: str) -> str:
    return what if len(sources) == 1 else f"{source.name}, {what}"


def _smooth(spots: Sequence[Spot]) -> list[Spot]:
    """Means over a window that grows with the curve."""
    reach = len(spots) // 40
    found = []
    for middle, spot in enumerate(spots):
        near = spots[max(0, middle - reach) : middle + reach + 1]
        found.append(Spot(spot.x, sum(one.y for one in near) / len(near)))
    return found


def _acceptance(sources: Sequence[Source]) -> Chart:
    """At the end of each run."""
    series, rows = [], []
    for source in sources:
        found = [
            record["figures"]["acceptance_at_depth"]
            for record in source.document["curves"]
            if record["kind"] == "held_out" and record["figures"].get("acceptance_at_depth")
        ]
        known = [value for value in (found[-1] if found else []) if value is not None]
        spots = [Spot(place, value) for place, value in enumerate(known)]
        series.append(Series(name=source.name, spots=spots))
        rows += [[source.name, str(int(spot.x) + 1), f"{spot.y:.1%}"] for spot in spots]
    return Chart(
        name="acceptance-after-training",
        title="Acceptance at each depth, held out",
        reading="At the last measurement of each run.",
        kind="lines",
        x=depth_axis(series),
        y=Axis(label="acceptance", includes=(0.0, 1.0), is_percent=True),
        series=series,
        heads=["run", "depth", "acceptance"],
        rows=rows,
    )


def _table(series: Sequence[Series], label: str) -> dict[str, Any]:
    rows = [[one.name, f"{spot.x:,.0f}", number(spot.y, 4)] for one in series for spot in one.spots]
    return {"heads": ["run", "step", label], "rows": rows}
