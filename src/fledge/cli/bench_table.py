"""The result of a bench for people: one line for each load, and what it comes to."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.cli.render import say

_HEADS = ("load", "arm", "tokens/s", "per user", "TTFT p50", "p99", "TPOT p50", "p99", "failed")


def show(document: Mapping[str, Any]) -> None:
    """Write the table to stderr."""
    rows = [_cells(row) for row in document["rows"]]
    for line in align([list(_HEADS), *rows]):
        say(line)
    for row in document["rows"]:
        for kind, entry in row["errors"].items():
            where = f"{_load(row)}, {row['arm']}"
            say(f"{where}: {entry['count']} requests failed, {kind}: {entry['example']}")
    for comparison in document["comparisons"]:
        say(crossover_text(comparison))
    client = document["client"]
    if client:
        say(
            f"client: at most {client['most_chunks_per_s']:,.0f} chunks/s, adds about "
            f"{client['first_token_s'] * 1000:.1f} ms to a first token"
        )
    for warning in document["warnings"]:
        say(f"warning: {warning}")


def crossover_text(comparison: Mapping[str, Any]) -> str:
    """Whether one arm stops to pay, and where."""
    arm, baseline = comparison["arm"], comparison["baseline"]
    speedups = ", ".join(
        f"{row['speedup']['value']:.2f}x at {row['level']:g}"
        for row in comparison["rows"]
        if row["kind"] == "closed" and row["speedup"] is not None
    )
    crossover = comparison["crossover"]
    if crossover is None:
        return f"{arm} against {baseline}: no closed loop to compare"
    where = crossover["concurrency"]
    if where is None:
        end = f"faster at every load from {crossover['from']:g} to {crossover['to']:g} at once"
    elif where <= crossover["from"]:
        end = f"not faster even at {crossover['from']:g} at once"
    else:
        end = f"faster up to about {where:.0f} at once"
    return f"{arm} against {baseline}: {speedups}; {end}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    ttft, tpot = row["ttft_s"] or {}, row["tpot_s"] or {}
    rate = row["steady_tokens_per_s"] or row["tokens_per_s"]
    return [
        _load(row),
        row["arm"],
        _rate(rate),
        _rate(row["user_tokens_per_s"]),
        _milliseconds(ttft.get("p50")),
        _milliseconds(ttft.get("p99")),
        _milliseconds(tpot.get("p50")),
        _milliseconds(tpot.get("p99")),
        f"{row['requests'] - row['good']} of {row['requests']}",
    ]


def _load(row: Mapping[str, Any]) -> str:
    unit = "at once" if row["kind"] == "closed" else f"req/s {row['kind']}"
    return f"{row['level']:g} {unit}"


def _rate(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "–"
    value = f"{interval['value']:,.1f}"
    if interval["low"] is None:
        return value
    return f"{value} ± {interval['high'] - interval['value']:,.1f}"


def _milliseconds(interval: Mapping[str, Any] | None) -> str:
    return "–" if interval is None else f"{interval['value'] * 1000:,.1f} ms"


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
