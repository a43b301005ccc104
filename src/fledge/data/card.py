"""The data card: what is in a directory of conversations, where it came from, what was left out.

`card.json` has every figure, `card.md` shows them to people. Both follow from the rows and the
counts alone: no dates, no machines, so equal work gives equal cards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fledge.contracts.data_settings import PrepareSettings, SourceSettings
from fledge.contracts.toml_settings import to_plain
from fledge.data.card_markdown import render_card
from fledge.data.statistics import RowStatistics
from fledge.data.tally import SourceTally
from fledge.store.cache_publish import flush
from fledge.store.manifest import write_json

CARD_JSON = "card.json"
CARD_MARKDOWN = "card.md"
SCHEMA = 1

ROW_COUNTS = (
    "read",
    "bad",
    "private",
    "exact_duplicates",
    "near_duplicates",
    "overlaps",
    "kept",
    "left_out",
    "out",
)
"""read = bad + private + exact_duplicates + near_duplicates + overlaps + kept, and
kept = left_out + out."""


def make_card(
    settings: PrepareSettings,
    tallies: Sequence[SourceTally],
    statistics: RowStatistics,
    *,
    benchmarks: Sequence[str],
    index: Mapping[str, Any],
    target: str | None,
) -> dict[str, Any]:
    """The figures of a card; `target` is named where it wrote prompts itself."""
    sources = [
        _source_entry(source, tally, statistics.rows_by_source[source.name])
        for source, tally in zip(settings.sources, tallies, strict=True)
    ]
    licences: Counter[str] = Counter()
    for entry in sources:
        licences[entry["licence"]] += entry["rows"]["out"]
    return {
        "schema": SCHEMA,
        "rows": statistics.rows,
        "licences": dict(sorted(licences.items())),
        "sources": sources,
        "totals": {
            "rows": {name: sum(entry["rows"][name] for entry in sources) for name in ROW_COUNTS},
            "identifiers": _sum(entry["identifiers"] for entry in sources),
            "overlaps": _sum(
                [dict.fromkeys(benchmarks, 0), *(entry["overlaps"] for entry in sources)]
            ),
        },
        "output": statistics.to_json(),
        "filters": {
            "max_turn_chars": settings.max_turn_chars,
            "privacy": to_plain(settings.privacy),
            "duplicates": to_plain(settings.duplicates),
            "decontaminate": to_plain(settings.decontaminate),
        },
        "blend": {"rows": settings.rows, "seed": settings.seed},
        "duplicate_index": dict(index),
        **({"target": target} if target is not None else {}),
    }


def write_card(directory: Path, card: Mapping[str, Any]) -> list[Path]:
    """Both files of a card."""
    document, page = directory / CARD_JSON, directory / CARD_MARKDOWN
    write_json(document, card)
    temporary = page.with_name(f".{page.name}.tmp")
    temporary.write_text(render_card(card), encoding="utf-8", errors="backslashreplace")
    flush(temporary)
    temporary.replace(page)
    flush(directory)
    return [document, page]


def _source_entry(source: SourceSettings, tally: SourceTally, num_out: int) -> dict[str, Any]:
    report = tally.report
    return {
        "name": source.name,
        "licence": source.licence,
        "is_self": source.is_self,
        "weight": source.weight,
        "max_rows": source.max_rows,
        "rows": {
            "read": tally.rows_read,
            "bad": tally.bad,
            "private": tally.private,
            "exact_duplicates": tally.exact_duplicates,
            "near_duplicates": tally.near_duplicates,
            "overlaps": tally.num_overlaps,
            "kept": tally.kept,
            "left_out": tally.kept - num_out,
            "out": num_out,
        },
        "bytes_read": report.get("bytes_read", 0),
        "files": report.get("schemas", {}),
        "identifiers": dict(sorted(tally.identifiers.items())),
        "overlaps": dict(sorted(tally.overlaps.items())),
        "bad_by_reason": dict(sorted(report.get("bad_by_reason", {}).items())),
        "bad_rows": report.get("bad", []),
        "duplicate_ids": report.get("duplicate_ids", 0),
        **({"variants": _variants(tally)} if source.variants else {}),
        **({"self_prompts": report["self_prompts"]} if "self_prompts" in report else {}),
    }


def _variants(tally: SourceTally) -> dict[str, int]:
    """How many were made, of how many rows, and rows that have none."""
    rows = tally.report.get("rows_read", 0) - tally.bad
    return {"made": tally.variants, "of_rows": rows, "rows_without": tally.without_variants}


def _sum(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return dict(sorted(total.items()))
