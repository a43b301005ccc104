"""A row on disk is the row in memory."""

import json
from typing import Any

import pytest

from fledge.contracts.conversation import Answer, Conversation, Origin
from fledge.contracts.errors import ArtifactError

ROW = Conversation(
    id="tools:7",
    messages=(
        {"role": "user", "content": "Wie warm ist es in 東京?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function"}]},
        {"role": "tool", "content": "21", "tool_call_id": "c1"},
        {"role": "assistant", "content": "21 °C"},
    ),
    origin=Origin(source="tools", licence="MIT", file="tools.jsonl", row=7, row_id="seven"),
    tools=({"type": "function", "function": {"name": "temperature"}},),
    answers=(
        Answer(
            message=3, model="m", temperature=0.7, seed=1, finish_reason="stop", token_ids=(5, 6)
        ),
        Answer(message=1, model="m", temperature=0.0, seed=2, finish_reason="tool_calls"),
    ),
)
SMALL = Conversation(
    id="a:1",
    messages=({"role": "user", "content": "Hi"},),
    origin=Origin(source="a", licence="MIT", file="a.txt", row=1),
)


@pytest.mark.parametrize("row", [ROW, SMALL])
def test_rows_survive_json(row: Conversation) -> None:
    assert Conversation.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_empty_fields_are_left_out() -> None:
    assert SMALL.to_json() == {
        "id": "a:1",
        "messages": [{"role": "user", "content": "Hi"}],
        "origin": {"source": "a", "licence": "MIT", "file": "a.txt", "row": 1},
    }
    assert "token_ids" not in ROW.to_json()["answers"][1]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"id": "a"},
        {"id": 1, "messages": [], "origin": SMALL.to_json()["origin"]},
        {"id": "a", "messages": "Hi", "origin": SMALL.to_json()["origin"]},
        {"id": "a", "messages": [], "origin": {"source": "a"}},
        {"id": "a", "messages": [], "origin": SMALL.to_json()["origin"], "answers": [{}]},
        {"id": "a", "messages": [], "origin": SMALL.to_json()["origin"], "answers": ["x"]},
        [1, 2],
        "text",
        5,
        None,
    ],
)
def test_strange_rows_are_refused_in_words(row: Any) -> None:
    with pytest.raises(ArtifactError, match="this is not a row that fledge wrote"):
        Conversation.from_json(row)
