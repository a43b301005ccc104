"""Charts of benches: what users get at rising load, with a head and without."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fledge.lab.chart import Axis, Chart, Mark, Series, Spot, number
from fledge.lab.report_sources import Source
from fledge.lab.report_text import depth_axis, interval_text

Row = Mapping[str, Any]
Pick = Callable[[Row], Mapping[str, Any] | None]
_MS = 1000.0
_WIDE = 60.0
"""Figures that differ by more than this are shown on a logarithmic scale."""


def bench_charts(sources: Sequence[Source]) -> list[Chart]:
    """Everything over users at once, then everything over requests per second."""
    charts = [
        _over_users(sources, "throughput", "Throughput against concurrency", "tokens/s", _rate,
            "All users together; where the lines meet, the head stops to pay."),
        _over_users(sources, "tpot", "Time per token against concurrency", "TPOT, ms (median)",
            lambda row: _part(row, "tpot_s", "p50"), "What one user waits for each token after "
            "the first.", scale=_MS),
        _speedups(sources),
        _interactivity(sources),
        _over_users(sources, "ttft", "Time to first token against concurrency",
            "TTFT, ms (99th percentile)", lambda row: _part(row, "ttft_s", "p99"),
            "Of a hundred users, ninety-nine wait less.", scale=_MS),
        _acceptance(sources),
        _over_users(sources, "cost", "Cost of a million tokens", _cost_label(sources), _cost,
            "The price of an hour of all GPUs over the tokens of an hour."),
        _over_rates(sources, "ttft-open", "Time to first token at a rate",
            "TTFT, ms (99th percentile)", lambda row: _part(row, "ttft_s", "p99"),
            "Open loop: requests come at this rate whatever the server does, and time counts "
            "from when a request was due.", scale=_MS),
        _over_rates(sources, "goodput", "Goodput at a rate", "answers/s within the service level",
            lambda row: row["goodput_per_s"], "Where goodput leaves the rate, the service level "
            "breaks."),
    ]  # fmt: skip
    return [chart for chart in charts if chart.has_data]


def _rate(row: Row) -> Mapping[str, Any] | None:
    steady: Mapping[str, Any] | None = row["steady_tokens_per_s"]
    return steady or row["tokens_per_s"]


def _part(row: Row, name: str, part: str) -> Mapping[str, Any] | None:
    times: Mapping[str, Mapping[str, Any]] | None = row[name]
    return times[part] if times else None


def _cost(row: Row) -> Mapping[str, Any] | None:
    return next(iter(row["cost_per_million_tokens"].values()), None)


def _cost_label(sources: Sequence[Source]) -> str:
    for source in sources:
        prices = source.document["settings"].get("gpu_prices") or {}
        for name, price in prices.items():
            return f"at {price:g} an hour ({name})"
    return "price"


def arm_name(source: Source, arm: str, sources: Sequence[Source]) -> str:
    return arm if len(sources) == 1 else f"{source.name}: {arm}"


def _arms(source: Source) -> list[str]:
    return [str(arm["name"]) for arm in source.document["arms"]]


def _rows(source: Source, arm: str, *, is_closed: bool) -> list[Row]:
    return [
        row
        for row in source.document["rows"]
        if row["arm"] == arm and (row["kind"] == "closed") == is_closed
    ]


def _over_users(
    sources: Sequence[Source], name: str, title: str, label: str, pick: Pick, reading: str,
    *, scale: float = 1.0,
) -> Chart:  # fmt: skip
    series = _series(sources, pick, scale, is_closed=True)
    return Chart(
        name=name,
        title=title,
        reading=reading + " Bands are 95% intervals over the repeats.",
        kind="lines",
        x=Axis(label="users at once", scale="log", is_doubling=True),
        y=_axis(label, series),
        series=series,
        marks=_crossovers(sources) if name == "throughput" else [],
        **_table(sources, "users at once", pick, scale, is_closed=True),
    )


def _over_rates(
    sources: Sequence[Source], name: str, title: str, label: str, pick: Pick, reading: str,
    *, scale: float = 1.0,
) -> Chart:  # fmt: skip
    series = _series(sources, pick, scale, is_closed=False)
    return Chart(
        name=name,
        title=title,
        reading=reading,
        kind="lines",
        x=Axis(label="requests/s", includes=(0.0,)),
        y=_axis(label, series),
        series=series,
        **_table(sources, "requests/s", pick, scale, is_closed=False),
    )


def _axis(label: str, series: Sequence[Series]) -> Axis:
    """From zero; by its logarithm where figures are of very different sizes."""
    values = [spot.y for one in series for spot in one.spots]
    if len(series) > 1 and values and 0 < min(values) * _WIDE < max(values):
        return Axis(label=label, scale="log")
    return Axis(label=label, includes=(0.0,))


def _series(
    sources: Sequence[Source], pick: Pick, scale: float, *, is_closed: bool
) -> list[Series]:
    found = []
    for source in sources:
        for place, arm in enumerate(_arms(source)):
            spots = []
            for row in _rows(source, arm, is_closed=is_closed):
                value = pick(row)
                if value is not None:
                    spots.append(_spot(row["level"], value, scale))
            is_plain = place == 0 and len(_arms(source)) > 1 and len(sources) == 1
            name = arm_name(source, arm, sources)
            found.append(Series(name=name, spots=spots, is_plain=is_plain))
    return found


def _spot(x: float, value: Mapping[str, Any], scale: float = 1.0) -> Spot:
    low, high = value["low"], value["high"]
    if low is None or high is None:
        return Spot(x, value["value"] * scale)
    # No rate and no time is below zero, whatever a few repeats say.
    return Spot(x, value["value"] * scale, max(0.0, low * scale), high * scale)


def _table(
    sources: Sequence[Source], load: str, pick: Pick, scale: float, *, is_closed: bool
) -> dict[str, Any]:
    rows = [
        [
            arm_name(source, arm, sources),
            number(row["level"]),
            interval_text(pick(row), scale=scale),
        ]
        for source in sources
        for arm in _arms(source)
        for row in _rows(source, arm, is_closed=is_closed)
    ]
    return {"heads": ["arm", load, "figure (95% interval)"], "rows": rows}


def _crossovers(sources: Sequence[Source]) -> list[Mark]:
    marks = []
    for source in sources:
        for comparison in source.document["comparisons"]:
            crossover = comparison["crossover"] or {}
            where = crossover.get("concurrency")
            if where is not None and where > crossover["from"]:
                name = "" if len(sources) == 1 else f"{source.name}: "
                marks.append(Mark("x", where, f"{name}crossover at {number(where, 2)}"))
    return marks[:2]


def _speedups(sources: Sequence[Source]) -> Chart:
    series, rows = [], []
    for source in sources:
        for comparison in source.document["comparisons"]:
            closed = [row for row in comparison["rows"] if row["kind"] == "closed"]
            spots = [_spot(row["level"], row["speedup"]) for row in closed if row["speedup"]]
            name = arm_name(source, comparison["arm"], sources)
            series.append(Series(name=name, spots=spots))
            rows += [[name, number(row["level"]), interval_text(row["speedup"])] for row in closed]
    return Chart(
        name="speed-up-under-load",
        title="Speed-up against concurrency",
        reading="Tokens/s over those of the first arm, repeat by repeat. Below the line plain "
        "decoding is faster.",
        kind="lines",
        x=Axis(label="users at once", scale="log", is_doubling=True),
        y=Axis(label="speed-up", includes=(1.0,)),
        series=series,
        marks=[Mark("y", 1.0, "plain decoding"), *_crossovers(sources)],
        heads=["arm", "users at once", "speed-up (95% interval)"],
        rows=rows,
    )


def _interactivity(sources: Sequence[Source]) -> Chart:
    """What one user sees against what all get: further up and to the right is better."""
    series, rows = [], []
    for source in sources:
        for place, arm in enumerate(_arms(source)):
            spots = []
            for row in _rows(source, arm, is_closed=True):
                user, rate = row["user_tokens_per_s"], _rate(row)
                if user is not None and rate is not None:
                    label = f"{row['level']:g}"
                    spots.append(Spot(user["value"], rate["value"], label=label))
                    rows.append(
                        [arm_name(source, arm, sources), label, interval_text(user)]
                        + [interval_text(rate)]
                    )
            is_plain = place == 0 and len(_arms(source)) > 1 and len(sources) == 1
            name = arm_name(source, arm, sources)
            series.append(Series(name=name, spots=spots, is_plain=is_plain, is_joined=True))
    return Chart(
        name="interactivity",
        title="Throughput against interactivity",
        reading="Each point is a number of users at once. Further up serves more, further to the "
        "right serves each user faster.",
        kind="scatter",
        x=Axis(label="tokens/s for one user", includes=(0.0,)),
        y=Axis(label="tokens/s for all users", includes=(0.0,)),
        series=series,
        heads=["arm", "users at once", "tokens/s for one user", "tokens/s for all"],
        rows=rows,
    )


def _acceptance(sources: Sequence[Source]) -> Chart:
    """At the lightest load, where most is drafted."""
    series, rows = [], []
    for source in sources:
        for arm in _arms(source):
            found = [
                row for row in _rows(source, arm, is_closed=True) if row["acceptance_at_depth"]
            ]
            for row in found[:1]:
                known = [one for one in row["acceptance_at_depth"] if one is not None]
                name = arm_name(source, arm, sources)
                spots = [Spot(place, value) for place, value in enumerate(known)]
                series.append(Series(name=name, spots=spots))
                rows += [[name, str(int(spot.x) + 1), f"{spot.y:.1%}"] for spot in spots]
    return Chart(
        name="acceptance-under-load",
        title="Acceptance at each depth, while serving",
        reading="At the lightest load. Probability that a draft is accepted given that those "
        "before it were.",
        kind="lines",
        x=depth_axis(series),
        y=Axis(label="acceptance", includes=(0.0, 1.0), is_percent=True),
        series=series,
        heads=["arm", "depth", "acceptance"],
        rows=rows,
    )
