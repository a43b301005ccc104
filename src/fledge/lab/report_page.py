"""The page: one HTML file with its style and its pictures inside; no script, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from fledge.lab.chart import Chart
from fledge.lab.chart_svg import draw_svg
from fledge.lab.report_figures import Tile
from fledge.lab.report_sources import KINDS, Source


@dataclass(frozen=True, slots=True)
class Table:
    """A table that stands for itself."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_folded: bool = False
    """Long: it opens when somebody asks for it, below the pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """All there is about one kind of result."""

    name: str
    introduction: str
    charts: Sequence[Chart]
    tables: Sequence[Table]


def draw_page(
    *,
    title: str,
    headline: str,
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    sources: Sequence[Source],
) -> str:
    """The whole page as one text."""
    folder = files("fledge.lab") / "page"
    template = Template((folder / "report.html").read_text(encoding="utf-8"))
    names = [section.name for section in sections]
    links = [f'<a href="#{name}">{name.capitalize()}</a>' for name in names]
    return template.substitute(
        title=escape(title),
        style=(folder / "report.css").read_text(encoding="utf-8").strip(),
        made=datetime.now(UTC).strftime("fledge report · %Y-%m-%d %H:%M UTC"),
        headline=escape(headline),
        notices="".join(map(_notice, notices(sources))),
        tiles="".join(map(_tile, tiles)),
        navigation="".join([*links, '<a href="#sources">Sources</a>']),
        sections="\n".join(map(_section, sections)),
        sources=f'<div class="cards">{"".join(map(_source, sources))}</div>',
    )


def notices(sources: Sequence[Source]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = [
        f"{source.name} is unfinished: these are its figures so far."
        for source in sources
        if not source.is_complete
    ]
    found += [
        f"{source.name}: {warning}"
        for source in sources
        for warning in source.document.get("warnings") or ()
    ]
    named = [str(source.provenance.get("device") or "unknown") for source in sources]
    devices = {name for name in named if not name.startswith("unknown")}
    if len(devices) > 1:
        shown = ", ".join(sorted(devices))
        found.append(f"The results come from different devices ({shown}): compare with care.")
    return found


def _notice(text: str) -> str:
    return f'<p class="notice" role="note">{escape(text)}</p>'


def _tile(tile: Tile) -> str:
    return (
        f'<div class="tile"><b>{escape(tile.figure)}</b><span>{escape(tile.label)}</span>'
        f"<small>{escape(tile.detail)}</small></div>"
    )


def _section(section: Section) -> str:
    charts = "".join(map(_figure, section.charts)) or "<p>Nothing was measured yet.</p>"
    above = "".join(
        f'<div class="table"><div class="scroll" tabindex="0">{_table(table)}</div></div>'
        for table in section.tables
        if not table.is_folded
    )
    below = "".join(map(_folded, (table for table in section.tables if table.is_folded)))
    return (
        f'<section id="{section.name}"><h2>{section.name.capitalize()}</h2>'
        f'<p class="lead">{escape(section.introduction)}</p>{above}'
        f'<div class="charts">{charts}</div>{below}</section>'
    )


def _folded(table: Table) -> str:
    bare = Table("", table.heads, table.rows)
    return (
        f'<details class="table below"><summary>{escape(table.title)}</summary>'
        f'<div class="scroll whole" tabindex="0">{_table(bare)}</div></details>'
    )


def _figure(chart: Chart) -> str:
    table = Table("", chart.heads, chart.rows)
    return (
        f"<figure><figcaption><h3>{escape(chart.title)}</h3>"
        f'<p class="reading">{escape(chart.reading)}</p></figcaption>{draw_svg(chart)}'
        f"<details><summary>Figures as a table</summary>"
        f'<div class="scroll" tabindex="0">{_table(table)}</div></details></figure>'
    )


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    sides = [_side([row[place] for row in table.rows]) for place in range(len(table.heads))]
    heads = "".join(
        f'<th scope="col"{side}>{escape(head)}</th>'
        for head, side in zip(table.heads, sides, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _side(cells: Sequence[str]) -> str:
    """Texts to the left, figures to the right."""
    is_text = any(cell[:1].isalpha() for cell in cells)
    return ' class="left"' if is_text else ""


def _source(source: Source) -> str:
    made = source.provenance
    packages = made.get("packages") or {}
    entries = {
        "what": KINDS[source.kind] + ("" if source.is_complete else ", unfinished"),
        "target": source.target,
        "device": made.get("device"),
        "date": made.get("date"),
        "commit": made.get("commit"),
        "torch": packages.get("torch"),
        "prompts": source.document.get("prompts"),
    }
    shown = "".join(
        f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in entries.items() if value
    )
    command = made.get("command")
    if command:
        shown += f"<dt>command</dt><dd><code>{escape(str(command))}</code></dd>"
    return f'<div class="table"><h3>{escape(source.name)}</h3><dl>{shown}</dl></div>'
