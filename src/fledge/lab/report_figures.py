"""What a report says first: a sentence, and the few figures that matter most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fledge.lab.chart import number
from fledge.lab.report_bench import arm_name
from fledge.lab.report_select import measured_heads
from fledge.lab.report_sources import Source
from fledge.lab.report_text import interval_text
from fledge.lab.report_train import curve
from fledge.lab.report_tune import best_row
from fledge.store.manifest import BENCH, HEAD, SCORECARD, TUNING


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure in large letters."""

    figure: str
    label: str
    detail: str


def headline(sources: Sequence[Source]) -> str:
    """What came out, in a sentence or two."""
    said = []
    for source in sources:
        if source.kind == SCORECARD:
            verdict = str(source.document["verdict"])
            said.append(verdict if _is_alone(source, sources) else f"{source.name}: {verdict}")
        if source.kind == BENCH:
            said += [
                crossover_sentence(source, comparison, sources)
                for comparison in source.document["comparisons"]
            ]
    shown = [sentence[0].upper() + sentence[1:] for sentence in said if sentence]
    return " ".join(shown) or "What was measured, in pictures and tables."


def crossover_sentence(
    source: Source, comparison: Mapping[str, Any], sources: Sequence[Source]
) -> str:
    """Up to which load an arm pays."""
    crossover = comparison["crossover"]
    if crossover is None:
        return ""
    benches = [one for one in sources if one.kind == BENCH]
    arm = arm_name(source, comparison["arm"], benches)
    where = crossover["concurrency"]
    if where is None:
        return (
            f"{arm} is faster than {comparison['baseline']} at every load measured, "
            f"{crossover['from']:g} to {crossover['to']:g} users at once."
        )
    if where <= crossover["from"]:
        return f"{arm} is not faster than {comparison['baseline']} even at the lightest load."
    limit = f"up to about {number(where, 2)} users at once"
    return f"{arm} is faster than {comparison['baseline']} {limit}."


def tiles(sources: Sequence[Source]) -> list[Tile]:
    """The best figure of each kind of result."""
    made = {SCORECARD: _selected, TUNING: _tuned, BENCH: _benched, HEAD: _trained}
    found = []
    for source in sources:
        own = made[source.kind](source)
        if not _is_alone(source, sources):
            own = [replace(tile, detail=f"{source.name}: {tile.detail}") for tile in own]
        found += own
    return found[:8]


def _is_alone(source: Source, sources: Sequence[Source]) -> bool:
    """The only one of its kind."""
    return sum(one.kind == source.kind for one in sources) == 1


def _selected(source: Source) -> list[Tile]:
    heads = measured_heads(source)
    if not heads:
        return []
    best = heads[0]
    accept = best["accept_length"]
    return [
        Tile(f"{best['speed_up']['value']:.2f}×", "speed-up of the best head",
             f"{best['name']}, {_range(best['speed_up'])}"),
        Tile(number(accept["value"]) if accept else "–", "accept length",
             f"mean over {len(best['tasks'])} tasks, {_range(accept)}"),
    ]  # fmt: skip


def _tuned(source: Source) -> list[Tile]:
    row = best_row(source)
    if row is None:
        return []
    shape = f"depth {row['depth']}, width {row['width']}, budget {row['budget']}"
    return [Tile(f"{row['speedup']:.2f}×", "fastest tree", shape)]


def _benched(source: Source) -> list[Tile]:
    found = []
    for comparison in source.document["comparisons"]:
        closed = [row for row in comparison["rows"] if row["kind"] == "closed" and row["speedup"]]
        if closed:
            best = max(closed, key=lambda row: row["speedup"]["value"])
            value = best["speedup"]
            found.append(
                Tile(f"{value['value']:.2f}×", f"best speed-up, {best['level']:g} at once",
                     f"{comparison['arm']} over {comparison['baseline']}, {_range(value)}")
            )  # fmt: skip
    rows = [row for row in source.document["rows"] if row["kind"] == "closed"]
    rates = [(row["steady_tokens_per_s"] or row["tokens_per_s"], row) for row in rows]
    known = [(rate, row) for rate, row in rates if rate is not None]
    if known:
        rate, row = max(known, key=lambda pair: pair[0]["value"])
        detail = f"{row['arm']}, {row['level']:g} at once, {_range(rate)}"
        found.append(Tile(number(rate["value"]), "tokens/s at most", detail))
    return found


def _trained(source: Source) -> list[Tile]:
    spots = curve(source, "decode", "accept_length")
    if not spots:
        return []
    best = max(spots, key=lambda spot: spot.y)
    return [Tile(f"{best.y:.2f}", "accept length while training", f"step {best.x:,.0f}")]


def _range(interval: Mapping[str, Any] | None) -> str:
    if interval is None or interval["low"] is None:
        return "no interval"
    return f"{number(interval['low'])} to {number(interval['high'])}"


def bench_table(source: Source) -> tuple[list[str], list[list[str]]]:
    """Every load of every arm."""
    prices = list(source.document["settings"].get("gpu_prices") or {})
    heads = ["arm", "load", "tokens/s", "per user", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99",
             "ITL p99, ms", "goodput/s", "accept length", "failed"]  # fmt: skip
    rows = []
    for row in source.document["rows"]:
        unit = "at once" if row["kind"] == "closed" else "requests/s"
        failed = row["requests"] - row["good"]
        rows.append(
            [
                row["arm"],
                f"{row['level']:g} {unit}",
                interval_text(row["steady_tokens_per_s"] or row["tokens_per_s"]),
                _mean(row["user_tokens_per_s"]),
                *(_ms(row, name, part) for name, part in (
                    ("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p50"), ("tpot_s", "p99"),
                    ("itl_s", "p99"))),
                _mean(row["goodput_per_s"]),
                _mean(row["accept_length"]),
                f"{failed} of {row['requests']}",
                *(_mean(row["cost_per_million_tokens"].get(name)) for name in prices),
            ]
        )  # fmt: skip
    return [*heads, *(f"cost of 1M tokens, {name}" for name in prices)], rows


def _ms(row: Mapping[str, Any], name: str, part: str) -> str:
    return number(row[name][part]["value"] * 1000) if row[name] else "–"


def _mean(interval: Mapping[str, Any] | None) -> str:
    return "–" if interval is None else number(interval["value"])
