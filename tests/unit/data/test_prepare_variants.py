"""A source of variants in `prepare`: what filters see of it, what the card says, interruptions."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fledge.contracts.data_settings import DecontaminateSettings, PrepareSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.data.duplicates import DuplicateIndex
from fledge.data.examination import Examination, ExaminedRow, Numbered, open_examination
from fledge.data.filtering import FilterPass
from fledge.data.prepare import prepare
from fledge.data.prepare_estimate import estimate_prepare
from fledge.data.tally import SourceTally
from fledge.store.rows import read_rows, row_files
from tests.unit.data.test_prepare import assert_counts_add_up, read_card

QUESTIONS = [
    f"Tom packs {10 + number} boxes with {3 + number % 5} pears each and sells half of them on "
    f"market day number {40 + number} of the year. How many pears are left for his sister?"
    for number in range(20)
]
MEASURED = "A train leaves the town at noon and drives 80 miles an hour for 3 hours without a stop."
QUESTIONS[7] = f"{MEASURED} How far does it go?"
QUESTIONS[11] = "How many days does a week have?"
QUESTIONS[12] = "Write to me at tom@example.org before 30 days are over, please, or call a friend."


@pytest.fixture
def settings(tmp_path: Path) -> PrepareSettings:
    lines = [json.dumps({"question": question}) for question in [*QUESTIONS, ""]]
    (tmp_path / "math.jsonl").write_text("\n".join(lines))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": MEASURED}))
    source = SourceSettings(
        name="more", path=(str(tmp_path / "math.jsonl"),), licence="MIT", variants=3
    )
    against = (str(tmp_path / "bench.jsonl"),)
    return PrepareSettings(
        sources=(source,), decontaminate=DecontaminateSettings(against=against, ngram=8)
    )


def test_variants_go_through_all_filters_and_are_counted(
    settings: PrepareSettings, tmp_path: Path
) -> None:
    progress = SilentProgress()
    prepare(settings, tmp_path / "out", target="x", self_prompts=None, progress=progress)
    rows, card = list(read_rows(tmp_path / "out")), read_card(tmp_path / "out")
    assert_counts_add_up(card, len(rows))
    (entry,) = card["sources"]
    assert entry["variants"] == {"made": 57, "of_rows": 20, "rows_without": 1}
    # One that overlaps with a benchmark has no variants, though its own numbers are not in them.
    assert (entry["rows"]["read"], entry["rows"]["bad"], entry["rows"]["overlaps"]) == (58, 1, 3)
    assert entry["identifiers"] == {"email": 3}
    assert not [row for row in rows if "example.org" in row.messages[0]["content"]]
    assert len({row.messages[0]["content"] for row in rows}) == len(rows) > 50
    assert not {row.messages[0]["content"] for row in rows} & set(QUESTIONS)
    assert {row.id.partition("+")[2] for row in rows} == {"1", "2", "3"}
    page = (tmp_path / "out" / "card.md").read_text()
    assert "of 20 rows 57 variants were made, and 1 rows have none." in page
    estimate = estimate_prepare(settings, tmp_path / "out", progress=progress)
    assert estimate.sources[0].kept == len(rows)


class Stopping:
    """Examines some rows, and is interrupted then."""

    def __init__(self, inner: Examination, num_rows: int) -> None:
        self._inner, self._num_rows = inner, num_rows

    def examine(self, rows: Iterable[Numbered]) -> Iterator[ExaminedRow]:
        for place, row in enumerate(self._inner.examine(rows)):
            if place == self._num_rows:
                raise KeyboardInterrupt
            yield row

    def close(self) -> None:
        self._inner.close()


def filtered(settings: PrepareSettings, work: Path, num_rows: int = 1000) -> list[SourceTally]:
    progress = SilentProgress()
    examination = Stopping(open_examination(settings, 1, progress), num_rows)
    work.mkdir(exist_ok=True)
    with DuplicateIndex(work / "index", settings.duplicates) as index:
        return FilterPass(
            settings,
            work,
            index,
            examination,
            self_prompts=None,
            progress=progress,
            rows_per_save=3,
        ).run()


def test_an_interrupted_run_ends_with_the_same_rows(
    settings: PrepareSettings, tmp_path: Path
) -> None:
    whole = filtered(settings, tmp_path / "whole")
    for num_rows in (4, 8):
        with pytest.raises(KeyboardInterrupt):
            filtered(settings, tmp_path / "broken", num_rows)
    assert filtered(settings, tmp_path / "broken") == whole
    ours, theirs = (
        b"".join(path.read_bytes() for path in row_files(tmp_path / name / "source-000"))
        for name in ("broken", "whole")
    )
    assert ours == theirs


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="variants of source more is -1; it must be between 0"):
        SourceSettings(name="more", path=("x",), licence="MIT", variants=-1)
