"""A tuning as text for people: the surface of speed-up over depth and width, and all rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.lab.tune_document import shown

PAGE_NAME = "tune.md"
Row = Mapping[str, Any]


def surface(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of a table, with a head: depths down, widths across, the fastest budget of each.

    Only the controller that all shapes were tried with, which is that of the first row.
    """
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        place = row["depth"], row["width"]
        if row["speedup"] is None or row["controller"] != rows[0]["controller"]:
            continue
        if place not in best or row["speedup"] > best[place]["speedup"]:
            best[place] = row
    depths, widths = (sorted({place[i] for place in best}) for i in (0, 1))
    lines = [["depth", *(f"width {width}" for width in widths)]]
    for depth in depths:
        cells = [best.get((depth, width)) for width in widths]
        lines.append([str(depth), *(_cell(row) for row in cells)])
    return lines


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row['speedup']:.2f} ({row['budget']})"


def surface_lines(rows: Sequence[Row]) -> list[str]:
    """The surface in columns of equal width, for a terminal."""
    lines = surface(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def write_page(document: Mapping[str, Any]) -> str:
    """The whole document, as markdown."""
    loads = ", ".join(map(str, document["settings"]["concurrency"]))
    parts = [
        f"# Tuning of {document['head']}",
        "**Unfinished**: what is here is what was measured so far."
        if document["state"] != "finished"
        else "",
        document["verdict"],
        f"Target {document['target']} in {document['dtype']} on {document['device']}; requests in "
        f"flight: {loads}; {document['num_questions']} questions, answers of at most "
        f"{document['settings']['max_tokens']} tokens.",
        "## Speed-up by depth and width\n\nThe fastest budget of each, in brackets.",
        _table(surface(document["rows"])),
        "## All shapes",
        _all_rows(document),
    ]
    failed = [f"- {_name(row)}: {row['error']}" for row in document["rows"] if row["error"]]
    parts += ["## Failed", "\n".join(failed)] if failed else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _all_rows(document: Mapping[str, Any]) -> str:
    names = ["shape", "speed-up", "accept length", "tokens/s", "visits", "", "equal answers"]
    ordered = sorted(
        document["rows"], key=lambda row: (row["state"] != "final", -(row["speedup"] or 0.0))
    )
    rows = [
        [
            _name(row), shown(row), _number(row["accept_length"], 2),
            _number(row["tokens_per_s"], 1), str(row["num_visits"]), row["state"], _equal(row),
        ]
        for row in ordered
    ]  # fmt: skip
    return _table([names, *rows])


def _name(row: Row) -> str:
    return (
        f"depth {row['depth']}, width {row['width']}, budget {row['budget']}, {row['controller']}"
    )


def _equal(row: Row) -> str:
    found = row["differences"]
    if found is None:
        return ""
    return f"{found['num_compared'] - found['num_different']} of {found['num_compared']}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = lines
    marked = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in marked)
