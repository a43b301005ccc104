"""Statistics of rows: right counts, percentiles within a percent, bounded memory."""

import random

from fledge.contracts.conversation import Conversation, Origin
from fledge.data.statistics import Lengths, RowStatistics


def row(*messages: dict[str, object], tools: tuple[dict[str, object], ...] = ()) -> Conversation:
    return Conversation(
        id="a:1",
        messages=tuple(messages),
        tools=tools,
        origin=Origin(source="a", licence="MIT", file="a.jsonl", row=1),
    )


def test_percentiles_are_near_and_small_numbers_exact() -> None:
    numbers = [int(random.Random(5).expovariate(1 / 4000)) for _ in range(5000)]
    lengths = Lengths()
    for number in numbers:
        lengths.add(number)
    figures = lengths.to_json()
    ordered = sorted(numbers)
    for share in (1, 10, 25, 50, 75, 90, 99):
        true = ordered[-(-len(ordered) * share // 100) - 1]
        assert abs(figures[f"p{share}"] - true) <= true * 0.016
    assert figures["max"] == ordered[-1]
    assert figures["mean"] == round(sum(numbers) / len(numbers), 1)
    assert len(lengths._counts) < 64 * 20


def test_no_rows_have_no_percentiles() -> None:
    assert Lengths().to_json() == {}
    assert RowStatistics().to_json()["rows"] == 0


def test_everything_a_row_has_is_counted() -> None:
    statistics = RowStatistics()
    statistics.add(
        row(
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "What is the weather in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
            {"role": "assistant", "content": "7 degrees", "reasoning_content": "easy"},
            {"role": "user", "content": "Thank you"},
            tools=({"type": "function"},),
        )
    )
    statistics.add(row({"role": "user", "content": "東京の天気は?"}))
    figures = statistics.to_json()
    assert figures["rows"] == 2
    assert figures["languages"] == {"en": 1, "ja": 1}
    assert figures["scripts"] == {"Jpan": 1, "Latn": 1}
    assert figures["messages_by_role"] == {"user": 3, "assistant": 2, "system": 1, "tool": 1}
    assert figures["rows_with"] == {
        "system_prompt": 1,
        "many_turns": 1,
        "tools": 1,
        "tool_calls": 1,
        "tool_results": 1,
        "reasoning": 1,
    }
    assert figures["user_turns"]["max"] == 2
    assert figures["prompt_chars"]["max"] == len("What is the weather in Oslo?Thank you")
    assert figures["chars"]["p10"] == len("東京の天気は?")
