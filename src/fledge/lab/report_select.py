"""Charts of selections: heads against plain decoding, over real tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.lab.bench_statistics import correlation
from fledge.lab.chart import Axis, Chart, Mark, Series, Spot, number
from fledge.lab.report_sources import Source
from fledge.lab.report_text import depth_axis, interval_text, prefixed

_MOST_HEADS = 6
"""Heads in one picture of bars or lines, the best ones; tables have all."""

_PLAIN = Mark("y", 1.0, "plain decoding")


def select_charts(sources: Sequence[Source]) -> list[Chart]:
    """Accept length against speed-up, speed-up and accept length by task, acceptance by depth."""
    found = [_accept_against_speed(sources)]
    for source in sources:
        found += [
            _by_task(source, sources, "speed_up", "Speed-up by task", "speed-up over plain"),
            _by_task(source, sources, "accept_length", "Accept length by task", "accept length"),
            _by_depth(source, sources),
        ]
    return [chart for chart in found if chart.has_data]


def measured_heads(source: Source) -> list[Mapping[str, Any]]:
    """Heads with figures, the best first."""
    return [one for one in source.document["heads"] if one.get("speed_up") is not None]


def _accept_against_speed(sources: Sequence[Source]) -> Chart:
    series = []
    rows = []
    for source in sources:
        spots = []
        for head in measured_heads(source):
            speed, accept = head["speed_up"], head["accept_length"]
            if accept is None:
                continue
            name = short_head(head["name"])
            spots.append(Spot(accept["value"], speed["value"], speed["low"], speed["high"], name))
            rows.append([source.name, head["name"], interval_text(accept), interval_text(speed)])
        series.append(Series(name=source.name, spots=spots))
    every = [spot for one in series for spot in one.spots]
    related = correlation([spot.x for spot in every], [spot.y for spot in every])
    if related is not None:
        series.append(Series(name="trend", spots=_trend(every), is_faint=True))
    said = (
        f"Correlation {related:.2f} over {len(every)} heads."
        if related is not None
        else "Too few heads for a correlation."
    )
    return Chart(
        name="accept-length-against-speed-up",
        title="Accept length against speed-up",
        reading=f"{said} Each point is a head, averaged over tasks; a head that guesses well but "
        "takes long to guess lies below the trend.",
        kind="scatter",
        x=Axis(label="accept length"),
        y=Axis(label="speed-up over plain decoding", includes=(1.0,)),
        series=series,
        marks=[_PLAIN],
        heads=["from", "head", "accept length", "speed-up"],
        rows=rows,
    )


def _trend(spots: Sequence[Spot]) -> list[Spot]:
    """The line of least squares, from the first point to the last."""
    count = len(spots)
    mean_x = sum(spot.x for spot in spots) / count
    mean_y = sum(spot.y for spot in spots) / count
    spread = sum((spot.x - mean_x) ** 2 for spot in spots)
    slope = sum((spot.x - mean_x) * (spot.y - mean_y) for spot in spots) / spread
    ends = (min(spot.x for spot in spots), max(spot.x for spot in spots))
    return [Spot(x, mean_y + slope * (x - mean_x)) for x in ends]


def _by_task(
    source: Source, sources: Sequence[Source], figure: str, title: str, label: str
) -> Chart:
    heads = measured_heads(source)
    tasks = list(dict.fromkeys(task for head in heads for task in head["tasks"]))
    series, rows = [], []
    for head in heads:
        spots = []
        for place, task in enumerate(tasks):
            value = head["tasks"].get(task, {}).get(figure)
            if value is not None:
                spots.append(Spot(place, value["value"], value["low"], value["high"], task))
        series.append(Series(name=short_head(head["name"]), spots=spots))
        cells = [interval_text(head["tasks"].get(task, {}).get(figure)) for task in tasks]
        rows.append([head["name"], *cells])
    return Chart(
        name=f"{figure.replace('_', '-')}-by-task-{source.name.replace('/', '-')}",
        title=prefixed(title, source, sources),
        reading=_shown_of(heads) + "Thin lines are 95% intervals.",
        kind="bars",
        x=Axis(label="task", categories=tuple(tasks)),
        y=Axis(label=label),
        series=series[:_MOST_HEADS],
        marks=[_PLAIN],
        heads=["head", *tasks],
        rows=rows,
    )


def _by_depth(source: Source, sources: Sequence[Source]) -> Chart:
    heads = measured_heads(source)
    series, rows = [], []
    for head in heads:
        depths = acceptance(head)
        spots = [Spot(place, value) for place, value in enumerate(depths)]
        series.append(Series(name=short_head(head["name"]), spots=spots))
        rows.append([head["name"], *(f"{value:.1%}" for value in depths)])
    most = max((len(one.spots) for one in series), default=0)
    return Chart(
        name=f"acceptance-by-depth-{source.name.replace('/', '-')}",
        title=prefixed("Acceptance at each depth", source, sources),
        reading=_shown_of(heads) + "Probability that a draft is accepted given that those before "
        "it were, averaged over tasks; a head that was trained to go deep stays high.",
        kind="lines",
        x=depth_axis(series),
        y=Axis(label="acceptance", includes=(0.0, 1.0), is_percent=True),
        series=series[:_MOST_HEADS],
        heads=["head", *(f"depth {depth}" for depth in range(1, most + 1))],
        rows=[row + [""] * (most + 1 - len(row)) for row in rows],
    )


def acceptance(head: Mapping[str, Any]) -> list[float]:
    """Acceptance at each depth, averaged over the tasks that reached it."""
    found = [task["figures"]["acceptance_at_depth"] for task in head["tasks"].values()]
    means = []
    for depth in range(max(map(len, found), default=0)):
        known = [one[depth] for one in found if depth < len(one) and one[depth] is not None]
        if not known:
            break
        means.append(sum(known) / len(known))
    return means


def _shown_of(heads: Sequence[Mapping[str, Any]]) -> str:
    if len(heads) <= _MOST_HEADS:
        return ""
    return f"The best {_MOST_HEADS} of {len(heads)} heads. "


def short_head(name: str) -> str:
    """A name that fits beside a point."""
    return name if len(name) <= 24 else "…" + name[-23:]


def select_table(source: Source) -> tuple[list[str], list[list[str]]]:
    """The ranking: every head, those that failed last."""
    rows = []
    for head in source.document["heads"]:
        if head.get("speed_up") is None:
            state = head.get("error") or head["state"]
            rows.append(["–", head["name"], "–", "–", "–", state])
            continue
        tied = " (tied with the best)" if head["is_tied_with_best"] else ""
        rows.append(
            [
                str(head["rank"]),
                head["name"],
                interval_text(head["speed_up"]),
                interval_text(head["accept_length"]),
                number(_mean_rate(head)),
                head["state"] + tied,
            ]
        )
    return ["rank", "head", "speed-up", "accept length", "tokens/s", "state"], rows


def _mean_rate(head: Mapping[str, Any]) -> float | None:
    rates = [task["figures"]["tokens_per_s"] for task in head["tasks"].values()]
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None
