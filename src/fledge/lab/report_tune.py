"""Charts of tunings: how fast each shape of draft tree was.

`tune.json` holds `rows`, one for each shape that was measured:

    {"depth", "width", "budget", "accept_length", "tokens_per_s", "speedup", "ci"}

`ci` is the 95% interval of the speed-up, [low, high], or null. The file
may also hold `best`, one of the rows, beside `target`, `head`, `device` and `concurrency`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.lab.chart import Axis, Chart, Series, Spot, number
from fledge.lab.report_sources import Source
from fledge.lab.report_text import prefixed

ROW_FIELDS = ("depth", "width", "budget", "accept_length", "tokens_per_s", "speedup", "ci")
Row = Mapping[str, Any]


def tune_charts(sources: Sequence[Source]) -> list[Chart]:
    """The surface of speed-up over depth and width, and of accept length."""
    charts = []
    for source in sources:
        rows = tune_rows(source)
        charts += [
            _surface(source, sources, rows, "speedup", "Speed-up by depth and width",
                "The best budget of each shape. The framed cell is the fastest; beyond it drafting "
                "costs more than it saves."),
            _surface(source, sources, rows, "accept_length", "Accept length by depth and width",
                "It grows with every draft; speed does not."),
            _by_budget(source, sources, rows),
        ]  # fmt: skip
    return [chart for chart in charts if chart.has_data]


def tune_rows(source: Source) -> list[Row]:
    """What was measured; refuses a file that another program wrote."""
    rows = source.document.get("rows")
    is_known = isinstance(rows, list) and all(
        isinstance(row, dict) and all(name in row for name in ROW_FIELDS) for row in rows
    )
    if not is_known:
        raise ArtifactError(
            f"{source.path / 'tune.json'} has no rows with {', '.join(ROW_FIELDS)}; make it again."
        )
    return list(rows or ())


def best_row(source: Source) -> Row | None:
    """What the tuning calls best: another may look faster that was measured less."""
    best = source.document.get("best")
    if best is not None and best.get("speedup") is not None:
        return dict(best)
    rows = [row for row in tune_rows(source) if row["speedup"] is not None]
    return max(rows, key=lambda row: row["speedup"], default=None)


def _surface(
    source: Source, sources: Sequence[Source], rows: Sequence[Row], figure: str, title: str,
    reading: str,
) -> Chart:  # fmt: skip
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        place = row["depth"], row["width"]
        # Trees of another controller than the first row's are not drafted whole.
        is_other = row.get("controller") != rows[0].get("controller")
        if row["speedup"] is None or row[figure] is None or is_other:
            continue
        if place not in best or row["speedup"] > best[place]["speedup"]:
            best[place] = row
    depths, widths = (sorted({place[i] for place in best}) for i in (0, 1))
    series = [
        Series(
            name=str(depth),
            spots=[
                Spot(column, best[depth, width][figure])
                for column, width in enumerate(widths)
                if (depth, width) in best
            ],
        )
        for depth in depths
    ]
    return Chart(
        name=f"surface-{figure.replace('_', '-')}-{source.name.replace('/', '-')}",
        title=prefixed(title, source, sources),
        reading=reading,
        kind="heat",
        x=Axis(label="width", categories=tuple(map(str, widths))),
        y=Axis(label="depth", categories=tuple(map(str, depths))),
        series=series,
        **_table(rows),
    )


def _by_budget(source: Source, sources: Sequence[Source], rows: Sequence[Row]) -> Chart:
    """The best shape at each budget."""
    best: dict[int, Row] = {}
    for row in rows:
        if row["speedup"] is not None and (
            row["budget"] not in best or row["speedup"] > best[row["budget"]]["speedup"]
        ):
            best[row["budget"]] = row
    spots = []
    for budget in sorted(best):
        low, high = best[budget]["ci"] or (None, None)
        spots.append(Spot(budget, best[budget]["speedup"], low, high))
    return Chart(
        name=f"speed-up-by-budget-{source.name.replace('/', '-')}",
        title=prefixed("Speed-up by budget", source, sources),
        reading="The fastest shape at each number of drafted nodes a pass may check.",
        kind="lines",
        x=Axis(label="budget", scale="log", is_doubling=True),
        y=Axis(label="speed-up", includes=(1.0,)),
        series=[Series(name="best shape", spots=spots)] if len(spots) > 1 else [],
        **_table(rows),
    )


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    def interval(row: Row) -> str:
        return "–" if row["ci"] is None else f"{number(row['ci'][0])} to {number(row['ci'][1])}"

    ordered = sorted(rows, key=lambda row: (row["depth"], row["width"], row["budget"]))
    return {
        "heads": ["depth", "width", "budget", "accept length", "tokens/s", "speed-up", "95%"],
        "rows": [
            [
                *(str(row[name]) for name in ("depth", "width", "budget")),
                *(number(row[name]) for name in ("accept_length", "tokens_per_s", "speedup")),
                interval(row),
            ]
            for row in ordered
        ],
    }
