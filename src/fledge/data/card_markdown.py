"""The data card as a page for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FEATURES = {
    "system_prompt": "a system prompt",
    "many_turns": "more than one user turn",
    "tools": "tool definitions",
    "tool_calls": "tool calls",
    "tool_results": "tool results",
    "reasoning": "reasoning",
}
_MOST_SHOWN = 12
"""Languages in the table; the rest is in the JSON."""


def render_card(card: Mapping[str, Any]) -> str:
    """Markdown of `card.json`."""
    parts = [
        "# Data card",
        _summary(card),
        "## Sources",
        _sources(card),
        "## Rows in and out",
        _rows(card),
        *_variants(card),
        *_files(card),
        *_bad_rows(card),
        *_privacy(card),
        *_benchmarks(card),
        *_self_prompts(card),
        "## What the rows are like",
        _shape(card["output"]),
        _lengths(card["output"]),
        _languages(card["output"]),
        "## Duplicates",
        _duplicates(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(card: Mapping[str, Any]) -> str:
    licences = ", ".join(f"{name} ({rows:,})" for name, rows in card["licences"].items())
    num_sources = len(card["sources"])
    text = (
        f"{card['rows']:,} conversations from {num_sources} source{'s' * (num_sources != 1)}. Rows "
        f"by licence, as the recipe declares them: {licences}."
    )
    if "target" in card:
        text += f" Prompts of the source `self` were written by {card['target']}."
    return text


def _sources(card: Mapping[str, Any]) -> str:
    return _table(
        ("source", "licence", "weight", "most rows", "rows", "share"),
        [
            (
                entry["name"],
                entry["licence"],
                f"{entry['weight']:g}",
                f"{entry['max_rows']:,}" if entry["max_rows"] else "all",
                f"{entry['rows']['out']:,}",
                _share(entry["rows"]["out"], card["rows"]),
            )
            for entry in card["sources"]
        ],
        num_left=2,
    )


def _rows(card: Mapping[str, Any]) -> str:
    heads = ("source", "read", "bad", "private", "equal", "nearly equal", "in a benchmark")
    entries = [*card["sources"], {"name": "**all**", "rows": card["totals"]["rows"]}]
    table = _table(
        (*heads, "kept", "not chosen", "out"),
        [(entry["name"], *(f"{rows:,}" for rows in entry["rows"].values())) for entry in entries],
    )
    return (
        "Rows read are either bad, or dropped by one filter (privacy, equal to an earlier row, "
        "nearly equal to one, sharing text with a benchmark), or kept. Of those kept, some are not "
        "chosen by the caps and weights of the blend.\n\n" + table
    )


def _variants(card: Mapping[str, Any]) -> list[str]:
    lines = []
    for entry in card["sources"]:
        if "variants" in entry:
            found = entry["variants"]
            lines.append(
                f"Rows of {entry['name']} are variants with other numbers and first names: of "
                f"{found['of_rows']:,} rows {found['made']:,} variants were made, and "
                f"{found['rows_without']:,} rows have none."
            )
    return lines


def _files(card: Mapping[str, Any]) -> list[str]:
    rows = [
        (entry["name"], file, schema["sentence"])
        for entry in card["sources"]
        for file, schema in entry["files"].items()
    ]
    return ["## Files", _table(("source", "file", "read as"), rows, num_left=3)] if rows else []


def _bad_rows(card: Mapping[str, Any]) -> list[str]:
    reasons = [
        (entry["name"], reason, f"{count:,}")
        for entry in card["sources"]
        for reason, count in entry["bad_by_reason"].items()
    ]
    repeated = [
        f"{entry['duplicate_ids']:,} rows of {entry['name']} bring an id that occurred before; "
        "they were kept or dropped for what they say."
        for entry in card["sources"]
        if entry["duplicate_ids"]
    ]
    if not reasons:
        return ["## Ids", *repeated] if repeated else []
    examples = [
        f"- `{row['file']}:{row['line']}`: {_cell(row['reason'])}"
        for entry in card["sources"]
        for row in entry["bad_rows"]
    ]
    table = _table(("source", "reason", "rows"), reasons, num_left=2)
    return ["## Bad rows", table, "The first of each source:", "\n".join(examples), *repeated]


def _privacy(card: Mapping[str, Any]) -> list[str]:
    settings = card["filters"]["privacy"]
    if not settings["enabled"]:
        return ["## Identifiers", "Not looked for: the recipe turns privacy off."]
    kinds = list(card["totals"]["identifiers"])
    looked = "names and places included" if settings["names"] else "names and places not looked for"
    special = ", ".join(f"{kind}: {action}" for kind, action in settings["actions"].items())
    text = f"Action: {settings['default']}{f' ({special})' if special else ''}; {looked}."
    if not kinds:
        return ["## Identifiers", f"{text} None were found."]
    entries = [*card["sources"], {"name": "**all**", **card["totals"]}]
    rows = [
        (entry["name"], *(f"{entry['identifiers'].get(kind, 0):,}" for kind in kinds))
        for entry in entries
        if entry["identifiers"]
    ]
    return ["## Identifiers", f"{text} Found in the rows read:", _table(("source", *kinds), rows)]


def _benchmarks(card: Mapping[str, Any]) -> list[str]:
    if not card["filters"]["decontaminate"]["against"]:
        return ["## Benchmarks", "Rows were not compared with benchmark prompts."]
    benchmarks = list(card["totals"]["overlaps"])
    entries = [*card["sources"], {"name": "**all**", **card["totals"]}]
    rows = [
        (entry["name"], *(f"{entry['overlaps'].get(name, 0):,}" for name in benchmarks))
        for entry in entries
        if entry["overlaps"]
    ]
    text = "Rows left out because they share text with a prompt of a benchmark:"
    return ["## Benchmarks", text, _table(("source", *benchmarks), rows)]


def _self_prompts(card: Mapping[str, Any]) -> list[str]:
    written = [entry for entry in card["sources"] if "self_prompts" in entry]
    if not written:
        return []
    names = ("tries", "kept", "mean_words", "distinct_1", "distinct_2", "type_token")
    heads = ("source", "tries", "usable", "words each", "distinct words", "distinct pairs")
    rows = [
        (entry["name"], *(f"{entry['self_prompts'][name]:,.4g}" for name in names))
        for entry in written
    ]
    return [
        "## Prompts of the target",
        "Diversity is different words, or pairs of words, over all; the last column is the first "
        "measure within stretches of 1,000 words, which does not fall as prompts are added.",
        _table((*heads, "in stretches"), rows),
    ]


def _shape(output: Mapping[str, Any]) -> str:
    rows = [
        (f"with {_FEATURES.get(name, name)}", f"{count:,}", _share(count, output["rows"]))
        for name, count in output["rows_with"].items()
    ]
    return _table(("conversations", "rows", "share"), rows)


def _lengths(output: Mapping[str, Any]) -> str:
    measures = {
        "user turns": output["user_turns"],
        "characters in user turns": output["prompt_chars"],
        "characters in all turns": output["chars"],
    }
    heads = list(output["chars"])
    if not heads:
        return ""
    rows = [(name, *(f"{figures[h]:,}" for h in heads)) for name, figures in measures.items()]
    return _table(("per conversation", *heads), rows)


def _languages(output: Mapping[str, Any]) -> str:
    shown = list(output["languages"].items())[:_MOST_SHOWN]
    scripts = ", ".join(f"{name} {count:,}" for name, count in output["scripts"].items())
    rows = [(name, f"{count:,}", _share(count, output["rows"])) for name, count in shown]
    if not rows:
        return ""
    return (
        _table(("language", "rows", "share"), rows)
        + f"\n\nLanguages are guessed from small words of the user turns; `und` is undecided. "
        f"Scripts: {scripts}."
    )


def _duplicates(card: Mapping[str, Any]) -> str:
    settings, index = card["filters"]["duplicates"], card["duplicate_index"]
    kinds = [kind for kind in ("exact", "near") if settings[kind]]
    if not kinds:
        return "Not looked for: the recipe turns both kinds off."
    text = f"Looked for: {' and '.join(kinds)}"
    if settings["near"]:
        text += f", above an estimated similarity of {settings['threshold']:g}"
    return (
        f"{text}. The index held {index['rows']:,} rows in {index['bytes_per_row']:,} bytes each."
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> str:
    rule = ["---" if place < num_left else "--:" for place in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
