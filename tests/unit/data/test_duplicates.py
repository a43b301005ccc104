"""Which rows count as the same, and what survives when a run does not."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import DuplicateSettings
from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, MismatchError
from fledge.data import duplicates
from fledge.data.duplicates import MAX_BUCKET, DuplicateIndex

ORIGIN = Origin(source="s", licence="none", file="f", row=1)
LONG = (
    "A small bakery at the corner of our street opens early in the morning and sells bread, rolls "
    "and cakes that are still warm. The baker gets up in the middle of the night, kneads the dough "
    "with his hands and lights the old oven that his grandfather built when the village had no "
    "electricity. Write a short story about the day on which the oven breaks and nobody in the "
    "village gets any bread, and tell how the neighbours help him to repair it before sunrise."
)
CHINESE = (
    "我们街角有一家小面包店，每天清晨开门，出售还热乎的面包、小圆面包和蛋糕。面包师半夜起床，用双手揉面，"
    "点燃祖父在村里还没有电的时候建造的旧烤炉。请写一个短篇故事，讲述烤炉坏掉的那一天。"
)
THAI = (
    "ร้านเบเกอรี่เล็กๆที่หัวมุมถนนของเราเปิดแต่เช้าตรู่และขายขนมปังกับเค้กที่ยังอุ่นอยู่คนทำขนมปังตื่นกลางดึก"
    "นวดแป้งด้วยมือและจุดเตาอบเก่าที่ปู่ของเขาสร้างไว้ตอนที่หมู่บ้านยังไม่มีไฟฟ้า"
)


def row(*turns: str, system: str | None = None, tools: tuple[dict[str, Any], ...] = ()) -> Any:
    """A conversation of user turns, each answered."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for i, turn in enumerate(turns):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": f"{i}"}]
    return Conversation(id="1", messages=tuple(messages), origin=ORIGIN, tools=tools)


@pytest.fixture
def index(tmp_path: Path) -> Any:
    with DuplicateIndex(tmp_path / "index", DuplicateSettings()) as opened:
        yield opened


def test_equal_prompts_are_exact_duplicates(index: DuplicateIndex) -> None:
    assert index.check(row("Name three rivers.")) is None
    assert index.check(row("Name three rivers.")) == "exact"
    assert index.check(row("  NAME three\n rivers. ")) == "exact"
    assert index.check(row("Ｎａｍｅ three rivers.")) == "exact"
    assert index.num_rows == 1


def test_other_punctuation_or_numbers_make_another_short_prompt(index: DuplicateIndex) -> None:
    texts = ["What is C?", "What is C++?", "What is C#?", "What is 2+3?", "What is 2-3?"]
    assert [index.check(row(text)) for text in texts] == [None] * 5


def test_answers_do_not_matter_and_everything_asked_does(index: DuplicateIndex) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    asked = [
        row("Name three rivers."),
        row("Name three rivers.", "And lakes?"),
        row("Name three rivers.", system="Be brief."),
        row("Name three rivers.", tools=(tool,)),
    ]
    assert [index.check(one) for one in asked] == [None] * 4
    answered = ({"role": "user", "content": "Name three rivers."}, {"role": "assistant"})
    assert index.check(Conversation(id="2", messages=answered, origin=ORIGIN)) == "exact"
    result = {"role": "tool", "content": "Rhine"}
    assert index.check(Conversation(id="3", messages=(*answered, result), origin=ORIGIN)) is None


def test_similar_long_prompts_are_near_duplicates(index: DuplicateIndex) -> None:
    assert index.check(row(LONG)) is None
    assert index.check(row(LONG.replace("neighbours", "friends"))) == "near"
    assert index.check(row(LONG.replace(",", " -").upper())) == "near"
    assert index.check(row("Please! " + LONG)) == "near"
    words = LONG.split()
    half = " ".join([*words[:40], *(f"another{word}" for word in words[40:])])
    assert index.check(row(half)) is None
    assert index.num_rows == 2


@pytest.mark.parametrize(("text", "old", "new"), [(CHINESE, "祖父", "爷爷"), (THAI, "ปู่", "ตา")])
def test_scripts_without_spaces(index: DuplicateIndex, text: str, old: str, new: str) -> None:
    assert old in text
    assert index.check(row(text)) is None
    assert index.check(row(text.replace(old, new))) == "near"
    assert index.check(row(text[::-1])) is None


def test_short_prompts_must_be_equal(index: DuplicateIndex) -> None:
    text = "Write a fairy tale of two hundred words about a friendly {} who lives in a big forest"
    assert [index.check(row(text.format(animal))) for animal in ("cat", "dog")] == [None, None]


def test_an_exercise_with_other_numbers_is_another_exercise(index: DuplicateIndex) -> None:
    text = LONG + " The oven holds {} loaves and he needs {} of them. How often must he bake?"
    assert index.check(row(text.format(12, 60))) is None
    assert index.check(row(text.format(12, 72))) is None
    assert index.check(row(text.format(12, 60).replace("holds", "takes"))) == "near"


def test_a_shared_system_prompt_makes_no_duplicates(index: DuplicateIndex) -> None:
    system = "You work for a bakery. Today is 2024-05-01. " + LONG
    question = (
        "Which of the cakes in the window are made without any nuts, and which of them would you "
        "suggest for {}?"
    )
    parties = ["a child that is six", "my grandmother", "people who do not like chocolate at all"]
    rows = [row(question.format(party), system=system) for party in parties]
    assert [index.check(one) for one in rows] == [None] * 3
    assert index.check(row(LONG, system=system)) is None
    other_day = system.replace("05-01", "06-12")
    assert index.check(row(LONG + " Thank you.", system=other_day)) == "near"
    assert index.check(row(LONG + " Thank you.", system="You are a poet.")) is None


def test_other_questions_about_a_document_are_no_duplicates(index: DuplicateIndex) -> None:
    document = f"{LONG} {LONG[::-1]}"
    assert index.check(row(f"Who built the oven?\n\n{document}")) is None
    assert index.check(row(f"Who repairs the oven?\n\n{document}")) is None
    assert index.check(row(f"{document}\n\nWho built the oven?")) is None
    changed = document.replace("neighbours", "friends")
    assert index.check(row(f"Who built the oven?\n\n{changed}")) == "near"
    # Without a long line all lines are compared together.
    short = LONG.replace(" and ", "\nand ").replace(", ", ",\n")
    assert index.check(row(short)) is None
    assert index.check(row(short.replace("neighbours", "friends"))) == "near"


def test_each_kind_can_be_switched_off(tmp_path: Path) -> None:
    with DuplicateIndex(tmp_path / "exact", DuplicateSettings(near=False)) as index:
        answers = [index.check(row(text)) for text in (LONG, LONG + " Please.", LONG)]
    assert answers == [None, None, "exact"]
    with DuplicateIndex(tmp_path / "near", DuplicateSettings(exact=False)) as index:
        answers = [index.check(row(text)) for text in (LONG, LONG, "short", "short")]
    assert answers == [None, "near", None, None]
    with DuplicateIndex(tmp_path / "none", DuplicateSettings(exact=False, near=False)) as index:
        assert [index.check(row(LONG)) for _ in range(2)] == [None, None]


def test_strange_content_is_compared_like_any_other(index: DuplicateIndex) -> None:
    for messages in (
        ({"role": "user", "content": None},),
        ({"role": "user", "content": [{"type": "text", "text": LONG}]},),
        ({"role": "user", "content": "a lone surrogate \ud800 " + LONG},),
    ):
        one = Conversation(id="1", messages=messages, origin=ORIGIN)
        assert [index.check(one), index.check(one)] == [None, "exact"]


def test_a_million_characters(index: DuplicateIndex) -> None:
    text = " ".join(f"word{i}" for i in range(100_000))
    assert index.check(row(text)) is None
    assert index.check(row(text.replace("word500 ", "other500 "))) == "near"


def family(number: int) -> Any:
    """Long prompts that are alike, but not enough."""
    words = LONG.split()
    return row(" ".join([*words[:60], *(f"{word}{'x' * number}" for word in words[60:])]))


def test_large_families_cost_a_bounded_number_of_comparisons(tmp_path: Path) -> None:
    path = tmp_path / "index"
    settings = DuplicateSettings(threshold=0.9)
    with DuplicateIndex(path, settings) as index:
        assert [index.check(family(i)) for i in range(3 * MAX_BUCKET)] == [None] * 3 * MAX_BUCKET
        index.commit({})
    with sqlite3.connect(path) as connection:
        sizes = connection.execute("SELECT count(*) FROM bands GROUP BY key").fetchall()
    connection.close()
    assert max(sizes) <= (MAX_BUCKET,)


def test_what_waits_in_memory_is_found_like_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row(f"{LONG} {'really ' * (i % 7)}", system=f"Speaker {'x' * (i % 5)}") for i in range(40)
    ]
    rows += [row(f"short {i % 6}") for i in range(20)]
    found = []
    for max_waiting in (1, 3, 1000):
        monkeypatch.setattr(duplicates, "_MAX_WAITING", max_waiting)
        with DuplicateIndex(tmp_path / f"{max_waiting}", DuplicateSettings()) as index:
            found.append([index.check(one) for one in rows])
    assert found[0] == found[1] == found[2]
    assert set(Counter(found[0])) == {None, "exact", "near"}


def test_commit_keeps_rows_and_position_together(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with DuplicateIndex(path, DuplicateSettings()) as index:
        assert (index.position, index.num_rows, index.bytes_per_row) == (None, 0, 0.0)
        index.check(row("one"))
        index.check(row(LONG))
        index.commit({"file": "a.jsonl", "row": 2})
        assert index.bytes_per_row > 0
        index.check(row("two"))
    with DuplicateIndex(path, DuplicateSettings()) as index:
        assert (index.position, index.num_rows) == ({"file": "a.jsonl", "row": 2}, 2)
        assert index.check(row("two")) is None
        assert index.check(row("one")) == "exact"
        assert index.check(row(LONG + " Please.")) == "near"


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_duplicates import row
from fledge.contracts.data_settings import DuplicateSettings
from fledge.data import duplicates
duplicates._MAX_WAITING = 50
with duplicates.DuplicateIndex(Path(sys.argv[1]), DuplicateSettings()) as index:
    number = (index.position or {"row": 0})["row"]
    while True:
        number += 1
        assert index.check(row(f"{number} " * 30)) is None, number
        if number % 170 == 0:
            index.commit({"row": number})
            print(number, flush=True)
"""


def test_a_killed_run_leaves_its_last_commit(tmp_path: Path) -> None:
    path = tmp_path / "index"
    for kill in range(3):
        command = [sys.executable, "-c", _WRITER, str(path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [int(process.stdout.readline()) for _ in range(2 + kill)]
            os.kill(process.pid, signal.SIGKILL)
            lines += [int(line) for line in process.stdout]
        with DuplicateIndex(path, DuplicateSettings()) as index:
            assert index.position is not None
            last = index.position["row"]
            # It may have been killed between the commit and the line.
            assert last in (lines[-1], lines[-1] + 170)
            assert index.num_rows == last
            assert index.check(row(f"{last} " * 30)) == "exact"
            assert index.check(row(f"{last + 1} " * 30)) is None


def test_an_index_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    DuplicateIndex(path, DuplicateSettings(threshold=0.8)).close()
    with pytest.raises(MismatchError, match=r"'threshold': 0.8.*'threshold': 0.9.*remove the file"):
        DuplicateIndex(path, DuplicateSettings(threshold=0.9))


def test_two_processes_cannot_share_an_index(tmp_path: Path, index: DuplicateIndex) -> None:
    with pytest.raises(ArtifactError, match="another process uses"):
        DuplicateIndex(tmp_path / "index", DuplicateSettings())


def test_damaged_and_impossible_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no index " * 500)
    with pytest.raises(ArtifactError, match="is damaged .*; remove it and prepare again"):
        DuplicateIndex(tmp_path / "text", DuplicateSettings())
    with pytest.raises(ConfigError, match="cannot be opened for writing"):
        DuplicateIndex(tmp_path / "absent" / "index", DuplicateSettings())


def test_lost_signatures_and_facts_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with DuplicateIndex(path, DuplicateSettings()) as index:
        index.check(row(LONG))
        index.commit({})
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM signatures")
        connection.commit()
    connection.close()
    with (
        DuplicateIndex(path, DuplicateSettings()) as index,
        pytest.raises(ArtifactError, match="row 1 has no signature"),
    ):
        index.check(row(LONG + " Please."))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE facts SET value = '{'")
        connection.commit()
    connection.close()
    with pytest.raises(ArtifactError, match="traits is not JSON"):
        DuplicateIndex(path, DuplicateSettings())


def test_a_full_disk_is_said(index: DuplicateIndex) -> None:
    connection = index._store._connection
    connection.execute("PRAGMA max_page_count = 10")
    for number in range(500):
        index.check(row(f"{number} " * 30))
    with pytest.raises(CapacityError, match="the disk is full"):
        index.commit({})
