"""The data card goes along with the rows: each later stage adds a part of its own.

`prepare` writes the card; `regenerate` copies it and says who answered, `tokenize` copies it again
and says what became of the answers. So a corpus says all about its data, wherever it is taken.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.data.card import CARD_JSON, CARD_MARKDOWN
from fledge.data.markdown_table import render_table
from fledge.store.cache_publish import publish_file
from fledge.store.manifest import encode_json, write_json

_TITLE = "# Data card\n"


def add_answers(source: Path, out: Path, figures: Mapping[str, Any]) -> list[Path]:
    """The card of the conversations, and how they were answered."""
    return _carry(source, out, "answers", figures, _answers)


def add_corpus(source: Path, out: Path, figures: Mapping[str, Any]) -> list[Path]:
    """The card of the answers, and what the corpus holds of them."""
    return _carry(source, out, "corpus", figures, _corpus)


def _carry(
    source: Path,
    out: Path,
    part: str,
    figures: Mapping[str, Any],
    render: Callable[[Mapping[str, Any]], str],
) -> list[Path]:
    document, page = source / CARD_JSON, source / CARD_MARKDOWN
    try:
        card = json.loads(document.read_bytes()) if document.exists() else {}
        text = page.read_text(encoding="utf-8") if page.exists() else _TITLE
        extended = {**card, part: figures}
    except (ValueError, TypeError) as error:
        raise ArtifactError(
            f"the data card in {source} is damaged ({error}); remove {source} and make it again."
        ) from error
    write_json(out / CARD_JSON, extended)
    publish_file(out / CARD_MARKDOWN, encode_json(f"{text}\n{render(figures)}\n"))
    return [out / CARD_JSON, out / CARD_MARKDOWN]


def _answers(figures: Mapping[str, Any]) -> str:
    settings = figures["settings"]
    turns = "every assistant turn" if settings["turns"] == "all" else "the last assistant turn"
    losses = {
        **{f"left out ({reason})": rows for reason, rows in figures["dropped"].items()},
        "without an answer": figures["failed"],
        "ended before the last recorded turn": figures["cut_short"],
    }
    rows = [
        ("read", figures["rows_in"]),
        ("answered", figures["rows"]),
        *losses.items(),
        *((f"at temperature {one}", rows) for one, rows in figures["temperatures"].items()),
        *((f"answers: {one}", number) for one, number in figures["finish_reasons"].items()),
    ]
    return (
        f"## Answers\n\n{figures['model']} answered {turns} again, with at most "
        f"{settings['max_tokens']:,} tokens: {figures['answers']:,} answers.\n\n"
        + render_table(("conversations", "number"), [(name, f"{n:,}") for name, n in rows])
    )


def _corpus(figures: Mapping[str, Any]) -> str:
    keys = ("rows", "samples", "tokens", "loss_tokens")
    rows = [
        (
            name,
            ", ".join(one["licences"]),
            *(f"{one[key]:,}" for key in keys),
            f"{one['vocabulary_coverage']:.2%}",
        )
        for name, one in figures["sources"].items()
    ]
    vocabulary, lengths = figures["vocabulary"], figures["lengths"]
    totals = (figures["rows"]["used"], *(figures[key] for key in keys[1:]))
    rows.append(("**all**", "", *(f"{n:,}" for n in totals), f"{vocabulary['coverage']:.2%}"))
    heads = ("source", "licence", "rows", "samples", "tokens", "with loss", "in draft vocabulary")
    return (
        f"## Corpus\n\nTokens of {figures['target']}, with a draft vocabulary of "
        f"{vocabulary['size']:,}. A sample has {lengths['p50']:,} tokens at the median, "
        f"{lengths['max']:,} at most; {figures['rows']['read'] - figures['rows']['used']:,} rows "
        "gave none.\n\n" + render_table(heads, rows, num_left=2)
    )
