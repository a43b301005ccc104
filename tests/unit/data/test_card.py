"""The page of a data card: whatever is in the figures, tables stay tables."""

from typing import Any

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import DecontaminateSettings, PrepareSettings, SourceSettings
from fledge.data.card import make_card
from fledge.data.card_markdown import render_card
from fledge.data.statistics import RowStatistics
from fledge.data.tally import SourceTally

REPORT: dict[str, Any] = {
    "bytes_read": 100,
    "schemas": {"odd|name.jsonl": {"name": "chat", "sentence": "messages\nfrom `messages`"}},
    "bad_by_reason": {"not JSON": 1},
    "bad": [{"file": "odd|name.jsonl", "line": 7, "reason": "it is | not\nJSON"}],
    "duplicate_ids": 2,
}


def make(tally: SourceTally, **changes: Any) -> dict[str, Any]:
    settings = PrepareSettings(
        sources=(SourceSettings(name="a|b", path=("x",), licence="MIT"),), **changes
    )
    statistics = RowStatistics()
    for number in range(tally.kept):
        statistics.add(
            Conversation(
                id=f"a|b/{number}",
                messages=({"role": "user", "content": "What is this?"},),
                origin=Origin(source="a|b", licence="MIT", file="x", row=number),
            )
        )
    return make_card(
        settings,
        [tally],
        statistics,
        benchmarks=["bench.jsonl"] if settings.decontaminate.against else [],
        index={"rows": 3, "bytes_per_row": 200.5},
        target=None,
    )


def test_odd_names_stay_in_their_cells() -> None:
    page = render_card(make(SourceTally(rows_read=4, bad=1, kept=3, report=REPORT)))
    assert "3 conversations from 1 source. Rows by licence" in page
    assert "| a\\|b | 4 | 1 | 0 | 0 | 0 | 0 | 3 | 0 | 3 |" in page
    assert "| a\\|b | odd\\|name.jsonl | messages from `messages` |" in page
    assert "it is \\| not JSON" in page
    assert "2 rows of a|b bring an id that occurred before" in page
    assert "200.5 bytes each" in page
    for table in page.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        widths = {line.replace("\\|", "").count("|") for line in lines}
        assert len(widths) <= 1, table


def test_a_benchmark_without_hits_is_shown() -> None:
    against = DecontaminateSettings(against=("bench.jsonl",))
    card = make(SourceTally(rows_read=1, kept=1), decontaminate=against)
    assert card["totals"]["overlaps"] == {"bench.jsonl": 0}
    assert "| **all** | 0 |" in render_card(card)


def test_tallies_survive_json() -> None:
    tally = SourceTally(rows_read=9, bad=1, private=2, kept=6, report=REPORT)
    tally.overlaps["b"] += 1
    tally.identifiers.update({"email": 3})
    assert SourceTally.from_json(tally.to_json()) == tally
    assert tally.num_overlaps == 1
