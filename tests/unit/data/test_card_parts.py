"""Parts of the data card that later stages add."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.data.card_parts import add_answers

FIGURES: dict[str, Any] = {
    "model": "big-one",
    "settings": {"turns": "last", "max_tokens": 1024},
    "rows_in": 9,
    "rows": 5,
    "failed": 1,
    "answers": 5,
    "cut_short": 0,
    "dropped": {"trun|cated": 3},
    "finish_reasons": {"stop": 5},
    "temperatures": {"0.0": 2, "0.7": 3},
}


def test_a_part_is_added_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"rows": 9}')
    (tmp_path / "card.md").write_text("# Data card\n\nNine rows: Größe.\n", encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    assert add_answers(tmp_path, out, FIGURES) == [out / "card.json", out / "card.md"]
    assert json.loads((out / "card.json").read_text()) == {"rows": 9, "answers": FIGURES}
    page = (out / "card.md").read_text(encoding="utf-8")
    assert page.startswith("# Data card\n\nNine rows: Größe.\n\n## Answers\n\nbig-one answered the")
    assert "| left out (trun\\|cated) | 3 |\n" in page
    assert page.endswith("|\n")


def test_rows_without_a_card_get_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    add_answers(tmp_path, out, FIGURES)
    assert (out / "card.md").read_text().startswith("# Data card\n\n## Answers\n")


@pytest.mark.parametrize(
    ("name", "content"), [("card.json", b"{"), ("card.json", b"[1]"), ("card.md", b"\xff")]
)
def test_a_damaged_card_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match="the data card in .* is damaged .*; remove .* and mak"):
        add_answers(tmp_path, tmp_path, FIGURES)
