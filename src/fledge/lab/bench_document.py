"""The result of `fledge bench`: `bench.json`, made from the measurements of a run.

A row is one load of one arm, over all repeats; what is compared is compared repeat by repeat, since
those were measured side by side. docs/bench.md describes every field.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fledge.lab.bench_journal import Measurement
from fledge.lab.bench_statistics import crossing, ratio_of_repeats, repeats_interval
from fledge.lab.load_point import Point

BENCH_NAME = "bench.json"
SCHEMA = "bench/1"
_TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_RATES = (
    "tokens_per_s",
    "steady_tokens_per_s",
    "user_tokens_per_s",
    "requests_per_s",
    "goodput_per_s",
    "accept_length",
)
_BUSY_SHARE = 0.7
_LATE_SHARE = 0.25
Figure = Callable[[Mapping[str, Any]], float | None]


def make_document(
    measurements: Sequence[Measurement],
    *,
    arms: Sequence[Mapping[str, Any]],
    head: Mapping[str, Any],
    is_complete: bool,
) -> dict[str, Any]:
    """`arms` in the order of the run, the first being what the others are compared with."""
    names = [str(arm["name"]) for arm in arms]
    points = _points(measurements)
    rows = [
        _row(arm, point, found)
        for arm in names
        for point in points
        if (found := [one for one in measurements if (one.arm, one.point) == (arm, point)])
    ]
    return {
        "schema": SCHEMA,
        "is_complete": is_complete,
        **head,
        "arms": list(arms),
        "rows": rows,
        "comparisons": [_compare(measurements, points, names[0], name) for name in names[1:]],
        "warnings": [*_counting_warnings(arms), *_warnings(rows, head.get("client"))],
    }


def _points(measurements: Sequence[Measurement]) -> list[Point]:
    found = {one.point for one in measurements}
    return sorted(found, key=lambda point: (not point.is_closed, point.kind, point.level))


def _row(arm: str, point: Point, found: Sequence[Measurement]) -> dict[str, Any]:
    figures = [one.figures for one in found]
    lost = [one.lost for one in found if one.lost is not None]
    return {
        "arm": arm,
        **point.to_json(),
        "repeats": len(found),
        "lost": lost[0] if lost else None,
        "requests": sum(one["requests"] for one in figures),
        "good": sum(one["good"] for one in figures),
        "errors": _errors(figures),
        "tokens": sum(one["tokens"] for one in figures),
        "mean_prompt_tokens": _mean_prompt(figures),
        "cached_prompt_share": _cached_share(figures),
        **{name: _interval([one[name] for one in figures]) for name in _RATES},
        **{name: _times(figures, name) for name in _TIMES},
        "cost_per_million_tokens": {
            name: _interval([one["cost_per_million_tokens"][name] for one in figures])
            for name in (figures[0]["cost_per_million_tokens"] if figures else {})
        },
        "acceptance_at_depth": _acceptance(figures),
        "client": {
            "busy_share": max(one["client"]["busy_share"] for one in figures),
            "lag_p99_s": max((one["client"]["lag_p99_s"] or 0.0) for one in figures),
            "chunks_per_s": max(one["client"]["chunks_per_s"] for one in figures),
        },
    }


def _interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    interval = repeats_interval([value for value in values if value is not None])
    return None if interval is None else interval.to_json()


def _times(figures: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """Mean and percentiles, each over the repeats."""
    measured = [one[name] for one in figures if one[name] is not None]
    if not measured:
        return None
    return {part: _interval([one[part] for one in measured]) for part in measured[0]}


def _errors(figures: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for one in figures:
        for kind, entry in one["errors"].items():
            earlier = merged.get(kind, {"count": 0, "example": entry["example"]})
            merged[kind] = {**earlier, "count": earlier["count"] + entry["count"]}
    return merged


def _mean_prompt(figures: Sequence[Mapping[str, Any]]) -> float | None:
    tokens, good = (sum(one[name] for one in figures) for name in ("prompt_tokens", "good"))
    return tokens / good if tokens and good else None


def _cached_share(figures: Sequence[Mapping[str, Any]]) -> float | None:
    cached = sum(one["cached_prompt_tokens"] for one in figures)
    tokens = sum(one["prompt_tokens"] for one in figures)
    return cached / tokens if tokens else None


def _acceptance(figures: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Mean over the repeats at each depth that any of them reached."""
    depths = max((len(one["acceptance_at_depth"]) for one in figures), default=0)
    found: list[float | None] = []
    for depth in range(depths):
        at_depth = [
            one["acceptance_at_depth"][depth]
            for one in figures
            if depth < len(one["acceptance_at_depth"])
            and one["acceptance_at_depth"][depth] is not None
        ]
        found.append(sum(at_depth) / len(at_depth) if at_depth else None)
    return found


def throughput(figures: Mapping[str, Any]) -> float | None:
    """What a speed-up compares: tokens per second at full load where that was measured."""
    value: float | None = figures["steady_tokens_per_s"]
    return figures["tokens_per_s"] if value is None else value


def _compare(
    measurements: Sequence[Measurement], points: Sequence[Point], baseline: str, arm: str
) -> dict[str, Any]:
    """One arm against the first, load by load, and where it stops to pay."""
    whole = {one.key: one.figures for one in measurements if one.lost is None}
    repeats = sorted({one.repeat for one in measurements})
    rows = []
    for point in points:
        pairs = [
            (whole[arm, point, repeat], whole[baseline, point, repeat])
            for repeat in repeats
            if (arm, point, repeat) in whole and (baseline, point, repeat) in whole
        ]
        if pairs:
            rows.append({**point.to_json(), **_ratios(pairs)})
    return {"baseline": baseline, "arm": arm, "rows": rows, "crossover": _crossover(rows)}


def _ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """More than 1 is better in all of them."""

    def ratio(figure: Figure, *, is_time: bool) -> dict[str, Any] | None:
        both = [(figure(arm), figure(baseline)) for arm, baseline in pairs]
        known = [(a, b) for a, b in both if a is not None and b is not None]
        ours, theirs = [a for a, _ in known], [b for _, b in known]
        found = ratio_of_repeats(theirs, ours) if is_time else ratio_of_repeats(ours, theirs)
        return None if found is None else found.to_json()

    return {
        "speedup": ratio(throughput, is_time=False),
        "tpot_speedup": ratio(lambda one: one["tpot_s"] and one["tpot_s"]["p50"], is_time=True),
        "ttft_speedup": ratio(lambda one: one["ttft_s"] and one["ttft_s"]["p50"], is_time=True),
    }


def _crossover(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Users at once from which on the arm is not faster; None without a closed loop."""
    closed = [row for row in rows if row["kind"] == "closed" and row["speedup"] is not None]
    if not closed:
        return None
    levels = [row["level"] for row in closed]
    ratios = [row["speedup"]["value"] for row in closed]
    return {
        "concurrency": crossing(levels, ratios),
        "from": levels[0],
        "to": levels[-1],
        "not_distinguishable_at": [
            row["level"]
            for row in closed
            if row["speedup"]["low"] is not None
            and row["speedup"]["low"] <= 1 <= row["speedup"]["high"]
        ],
    }


def _counting_warnings(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where nobody knows how many tokens there were."""
    return [
        f"{arm['name']} does not say how many tokens it sends, and every chunk was counted as one: "
        "with several tokens in a chunk it is faster than it seems. Give --tokenizer."
        for arm in arms
        if arm.get("tokens") == "chunks"
    ]


def _warnings(rows: Sequence[Mapping[str, Any]], client: Mapping[str, Any] | None) -> list[str]:
    """Where the client, or the machine it runs on, may be what was measured."""
    busy = [row for row in rows if row["client"]["busy_share"] >= _BUSY_SHARE]
    late = [
        row
        for row in rows
        if row["tpot_s"]
        and row["client"]["lag_p99_s"] > _LATE_SHARE * row["tpot_s"]["p50"]["value"]
    ]
    found = []
    if busy:
        most = max(row["client"]["busy_share"] for row in busy)
        limit = f" (it can take {client['most_chunks_per_s']:,.0f} chunks/s)" if client else ""
        found.append(
            f"the client was busy up to {most:.0%} of the time{limit}, so that its own speed is "
            f"part of the figures: {_places(busy)}."
        )
    if late:
        most = max(row["client"]["lag_p99_s"] for row in late)
        found.append(
            f"the client was up to {most * 1000:.1f} ms late (99th percentile), which is much "
            "beside the time of a token; other programs on its machine may be the cause: "
            f"{_places(late)}."
        )
    return found


def _places(rows: Sequence[Mapping[str, Any]]) -> str:
    """`plain at closed 1, 2; head at closed 1`"""
    by_arm: dict[str, list[str]] = {}
    for row in rows:
        by_arm.setdefault(f"{row['arm']} at {row['kind']}", []).append(f"{row['level']:g}")
    return "; ".join(f"{where} {', '.join(levels)}" for where, levels in by_arm.items())
