"""`fledge report`: results of select, tune, bench and train on one page that needs nothing else.

`OUT` gets `report.html`, `report.json` (what the page shows, as data) and `plots/*.png`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fledge.contracts import provenance
from fledge.contracts.progress import Progress
from fledge.lab.chart import Chart
from fledge.lab.chart_png import draw_png
from fledge.lab.report_bench import bench_charts
from fledge.lab.report_figures import Tile, bench_table, headline, tiles
from fledge.lab.report_page import Section, Table, draw_page
from fledge.lab.report_select import select_charts, select_table
from fledge.lab.report_sources import KINDS, Source, read_sources
from fledge.lab.report_text import prefixed
from fledge.lab.report_train import train_charts
from fledge.lab.report_tune import tune_charts
from fledge.store.cache_publish import publish_file
from fledge.store.capacity import translated_disk_errors
from fledge.store.manifest import BENCH, HEAD, SCORECARD, TUNING, json_document

_MANY_HEADS = 12
PAGE_NAME, DATA_NAME, PLOTS_NAME = "report.html", "report.json", "plots"

_CHARTS: dict[str, Callable[[Sequence[Source]], list[Chart]]] = {
    SCORECARD: select_charts,
    TUNING: tune_charts,
    BENCH: bench_charts,
    HEAD: train_charts,
}
_INTRODUCTIONS = {
    SCORECARD: "Heads against plain decoding on the same prompts, in turns, on the engine that "
    "serves them. Speed-ups are averaged over tasks.",
    TUNING: "Shapes of the draft tree, each measured on this machine.",
    BENCH: "Users at rising load, and requests that come at their own rate.",
    HEAD: "Curves of training. They promise; the sections above measure.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows."""

    title: str
    headline: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    sources: Sequence[Source]

    @property
    def charts(self) -> list[Chart]:
        return [chart for section in self.sections for chart in section.charts]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "report/1",
            "title": self.title,
            "headline": self.headline,
            "figures": [asdict(tile) for tile in self.tiles],
            "sources": [
                {
                    "name": source.name,
                    "kind": KINDS[source.kind],
                    "target": source.target,
                    "is_complete": source.is_complete,
                    "provenance": dict(source.provenance),
                    "document": None if source.kind == HEAD else dict(source.document),
                }
                for source in self.sources
            ],
            "charts": [asdict(chart) for chart in self.charts],
            "provenance": provenance.collect(device="none"),
        }


def make_report(
    paths: Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    has_pictures: bool = True,
    progress: Progress,
) -> Report:
    """Read the directories, draw, and write; an older report in `out` is replaced."""
    report = compose(read_sources(paths), title=title)
    with translated_disk_errors(out, place="output"):
        out.mkdir(parents=True, exist_ok=True)
        page = draw_page(
            title=report.title,
            headline=report.headline,
            tiles=report.tiles,
            sections=report.sections,
            sources=report.sources,
        )
        publish_file(out / PAGE_NAME, page.encode())
        publish_file(out / DATA_NAME, json_document(report.to_json()))
        if has_pictures:
            _draw_pictures(report.charts, out / PLOTS_NAME, progress)
    return report


def compose(sources: Sequence[Source], *, title: str | None = None) -> Report:
    """What the page says, before it is drawn."""
    targets = list(dict.fromkeys(source.target for source in sources))
    sections = []
    for kind, name in KINDS.items():
        own = [source for source in sources if source.kind == kind]
        if own:
            sections.append(
                Section(
                    name=name,
                    introduction=_INTRODUCTIONS[kind],
                    charts=_CHARTS[kind](own),
                    tables=_tables(kind, own),
                )
            )
    return Report(
        title=title or f"Speculative decoding of {', '.join(targets)}",
        headline=headline(sources),
        tiles=tiles(sources),
        sections=sections,
        sources=sources,
    )


def _tables(kind: str, sources: Sequence[Source]) -> list[Table]:
    """Tables that stand for themselves."""
    if kind == SCORECARD:
        return [
            _ranking(prefixed("Ranking", source, sources), *select_table(source))
            for source in sources
        ]
    if kind == BENCH:
        return [
            Table(
                prefixed("All loads as a table", source, sources),
                *bench_table(source),
                is_folded=True,
            )
            for source in sources
        ]
    return []


def _ranking(title: str, heads: list[str], rows: list[list[str]]) -> Table:
    return Table(title, heads, rows, is_folded=len(rows) > _MANY_HEADS)


def _draw_pictures(charts: Sequence[Chart], folder: Path, progress: Progress) -> None:
    folder.mkdir(exist_ok=True)
    with progress.task("drawing pictures", len(charts), unit="pictures") as task:
        for chart in charts:
            publish_file(folder / f"{chart.name}.png", draw_png(chart))
            task.advance(1)
