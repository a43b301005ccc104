"""A row of each schema becomes the conversation it stands for."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.conversation import Conversation
from fledge.contracts.errors import ConfigError
from tests.unit.data.reading import Told, as_lines, read, reader, texts, write_lines

WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}


def one(tmp_path: Path, row: Any, **options: Any) -> Conversation:
    (conversation,) = read(write_lines(tmp_path / "rows.jsonl", row), **options)
    return conversation


def sentence(tmp_path: Path, row: Any) -> str:
    told = Told()
    read(write_lines(tmp_path / "rows.jsonl", row), told=told)
    return told.notes[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def call(call_id: str, arguments: str, name: str = "weather") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_chat_rows_stay_as_they_are(tmp_path):
    messages = [
        {"role": "system", "content": "Sé breve."},
        {"role": "developer", "content": ""},
        {"role": "user", "content": " 你好，天气? ", "name": "李"},
        {
            "role": "assistant",
            "content": "<think>hm</think> so",
            "reasoning_content": "let me see",
            "tool_calls": [call("call_xyz", '{"city":  "Oslo"}')],
        },
        {"role": "tool", "content": "☁", "tool_call_id": "call_xyz", "name": "weather"},
        {"role": "assistant", "content": "Cloudy."},
        user("And\r\nnow?"),
    ]
    row = one(tmp_path, {"id": 7, "messages": messages, "tools": [TOOL], "extra": 1})
    assert list(row.messages) == messages
    assert row.tools == (TOOL,)
    assert row.id == "src/1"
    assert (row.origin.source, row.origin.licence) == ("src", "MIT")
    assert (row.origin.file, row.origin.row, row.origin.row_id) == ("rows.jsonl", 1, "7")
    assert Conversation.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert sentence(tmp_path, {"messages": messages}) == (
        "rows.jsonl: OpenAI messages from field `messages` (and `tools`)"
    )


def test_chat_text_parts_and_other_keys(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    messages = [
        {"role": "user", "content": parts, "weight": 0, "refusal": None},
        {"role": "assistant", "content": "x", "reasoning": "r", "audio": None},
    ]
    row = one(tmp_path, {"messages": messages})
    assert row.messages == (user("abc"), {**assistant("x"), "reasoning_content": "r"})


def test_call_arguments_are_json_text_whatever_they_were(tmp_path):
    calls = [
        {"function": {"name": "a", "arguments": {"x": "ü"}}},
        {"id": "", "function": {"name": "b", "arguments": ""}},
        {"id": "mine", "type": "function", "function": {"name": "c", "arguments": '{"y":1}'}},
        {"name": "d"},
    ]
    messages = [
        user("go"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": {"value": "é"}, "name": "b"},
        {"role": "tool", "content": [{"type": "text", "text": "t"}]},
        {"role": "tool", "content": [1, 2], "tool_call_id": "mine"},
        {"role": "tool", "content": None},
    ]
    row = one(tmp_path, {"messages": messages})
    assert row.messages[1]["tool_calls"] == [
        call("call00001", '{"x": "ü"}', "a"),
        call("call00002", "{}", "b"),
        call("mine", '{"y":1}', "c"),
        call("call00004", "{}", "d"),
    ]
    results = [(m["tool_call_id"], m["name"], m["content"]) for m in row.messages[2:]]
    assert results == [
        ("call00002", "b", '{"value": "é"}'),
        ("call00001", "a", "t"),
        ("mine", "c", "[1, 2]"),
        ("call00004", "d", ""),
    ]


def test_generated_call_ids_suit_templates_that_want_nine_letters_and_digits(tmp_path):
    calls = [{"role": "assistant", "tool_calls": [{"name": "f"}] * 12}]
    row = one(tmp_path, {"messages": [user("go"), *calls]})
    ids = [each["id"] for each in row.messages[1]["tool_calls"]]
    assert len(set(ids)) == 12
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_legacy_function_call_and_functions(tmp_path):
    messages = [
        user("go"),
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"a": 1}'},
        },
        {"role": "function", "name": "weather", "content": "ok"},
    ]
    row = one(tmp_path, {"messages": messages, "functions": [WEATHER]})
    assert row.tools == (TOOL,)
    assert row.messages[1]["tool_calls"] == [call("call00001", '{"a": 1}')]
    assert row.messages[2] == {
        "role": "tool",
        "content": "ok",
        "tool_call_id": "call00001",
        "name": "weather",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("", ()),
        ("[]", ()),
        ([], ()),
        (TOOL, (TOOL,)),
        ([WEATHER], (TOOL,)),
        (json.dumps([WEATHER]), (TOOL,)),
        ([json.dumps(TOOL)], (TOOL,)),
    ],
)
def test_tool_definitions_in_any_form(tmp_path, given, expected):
    assert one(tmp_path, {"messages": [user("go")], "tools": given}).tools == expected


def test_lists_of_messages_and_prompts_of_messages(tmp_path):
    rows = write_lines(tmp_path / "lists.jsonl", [user("a")], [user("b"), assistant("c")])
    assert [row.messages for row in read(rows)] == [(user("a"),), (user("b"), assistant("c"))]
    assert one(tmp_path, {"prompt": [user("p")], "chosen": 1}).messages == (user("p"),)
    assert "messages from field `prompt`" in sentence(tmp_path, {"prompt": [user("p")]})
    assert one(tmp_path, {"messages": json.dumps([user("as text")])}).messages[0] == user("as text")


def test_sharegpt_with_calls_and_observations(tmp_path):
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "wait"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"c": "O"}}'},
        {"from": "function_call", "value": '[{"name": "weather", "arguments": {}}]'},
        {"from": "observation", "value": "1"},
        {"from": "tool", "value": "2"},
        {"from": "gpt", "value": "done"},
        {"from": "human", "value": "again"},
        {"from": "function_call", "value": {"name": "weather", "arguments": '{"d": 2}'}},
    ]
    row = {"conversations": turns, "tools": json.dumps([WEATHER]), "system": "S"}
    conversation = one(tmp_path, row)
    result = {"role": "tool", "name": "weather"}
    calls = [call("call00001", '{"c": "O"}'), call("call00002", "{}")]
    last = [call("call00003", '{"d": 2}')]
    assert conversation.tools == (TOOL,)
    assert conversation.messages == (
        {"role": "system", "content": "S"},
        user("q"),
        {**assistant("wait"), "tool_calls": calls},
        {**result, "content": "1", "tool_call_id": "call00001"},
        {**result, "content": "2", "tool_call_id": "call00002"},
        assistant("done"),
        user("again"),
        {"role": "assistant", "content": None, "tool_calls": last},
    )
    assert sentence(tmp_path, row).endswith(
        "ShareGPT turns from field `conversations` (and `tools`, `system`)"
    )


def test_sharegpt_with_roles_and_other_names(tmp_path):
    row = {"conversation": [user("q"), {"from": "ChatGPT", "value": "a"}]}
    assert one(tmp_path, row).messages == (user("q"), assistant("a"))


def test_alpaca(tmp_path):
    rows = write_lines(
        tmp_path / "alpaca.json",
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "S"},
        {"instruction": "Say.", "input": "", "output": ""},
        {"instruction": "Dolly.", "context": "c", "response": "r"},
        {"instruction": "And?", "output": "b", "history": [["q", "a"]]},
    )
    assert [list(row.messages) for row in read(rows)] == [
        [{"role": "system", "content": "S"}, user("Add.\n\n1 2"), assistant("3")],
        [user("Say.")],
        [user("Dolly.\n\nc"), assistant("r")],
        [user("q"), assistant("a"), user("And?"), assistant("b")],
    ]


@pytest.mark.parametrize("field", ["prompt", "question", "text", "instruction"])
def test_prompts_from_a_field(tmp_path, field):
    row = {"meta": 1, field: "Why?", "answer": "Because."}
    assert one(tmp_path, row).messages == (user("Why?"),)
    assert sentence(tmp_path, row) == f"rows.jsonl: prompts from field `{field}`"


def test_prompts_of_several_turns_and_of_plain_text(tmp_path):
    row = {"question_id": 81, "turns": ["first", "second"], "prompt": "no"}
    assert one(tmp_path, row).messages == (user("first"), user("second"))
    assert one(tmp_path, "just text").messages == (user("just text"),)
    (tmp_path / "list.json").write_text('[\n  "a",\n  "b [1, {2}"\n]\n')
    (tmp_path / "list.txt").write_text("[INST] a\n\n  {b}  \r\nlast")
    assert [row.messages[0]["content"] for row in read(tmp_path / "list.json")] == [
        "a",
        "b [1, {2}",
    ]
    rows = read(tmp_path / "list.txt")
    assert [row.messages[0]["content"] for row in rows] == ["[INST] a", "{b}", "last"]
    assert [row.origin.row for row in rows] == [1, 3, 4]


def test_tasks_give_a_conversation_for_each_instance(tmp_path):
    task = {"id": "t", "instruction": "Do.", "instances": [{"input": "x", "output": "y"}, {}]}
    bare = {"id": "u", "instruction": "Rest.", "instances": []}
    source = reader(write_lines(tmp_path / "tasks.jsonl", task, bare))
    rows = list(source)
    assert [row.messages for row in rows] == [
        (user("Do.\n\nx"), assistant("y")),
        (user("Do."),),
        (user("Rest."),),
    ]
    assert [(row.id, row.origin.row, row.origin.row_id) for row in rows] == [
        ("src/1", 1, "t"),
        ("src/2", 1, "t"),
        ("src/3", 2, "u"),
    ]
    assert (source.report.rows_read, source.report.duplicate_ids) == (3, 0)


def test_bfcl_schemas_become_json_schema(tmp_path):
    parameters = {
        "type": "dict",
        "properties": {
            "type": {"type": "float", "enum": ["dict", "any"]},
            "b": {"type": "array", "items": {"type": "tuple"}},
            "c": {"type": "any", "description": "dict"},
        },
    }
    row = {
        "id": "simple_1",
        "question": [[{"role": "system", "content": "S"}, user("a")], [user("b")]],
        "function": [{"name": "f.g", "parameters": parameters}],
    }
    conversation = one(tmp_path, row)
    assert conversation.messages == ({"role": "system", "content": "S"}, user("a"), user("b"))
    assert conversation.tools[0]["function"] == {
        "name": "f.g",
        "parameters": {
            "type": "object",
            "properties": {
                "type": {"type": "number", "enum": ["dict", "any"]},
                "b": {"type": "array", "items": {"type": "array"}},
                "c": {"description": "dict"},
            },
        },
    }


def test_format_forces_a_schema(tmp_path):
    row = {"instruction": "Do.", "input": "x", "output": "y", "text": "all of it"}
    assert one(tmp_path, row).messages[0] == user("Do.\n\nx")
    assert one(tmp_path, row, format="prompts").messages == (user("Do."),)
    assert one(tmp_path, {"instruction": "Do."}, format="alpaca").messages == (user("Do."),)
    lists = read(write_lines(tmp_path / "lists.jsonl", ["a", "b"], ["c"]), format="prompts")
    assert [row.messages for row in lists] == [(user("a"), user("b")), (user("c"),)]
    with pytest.raises(ConfigError, match=r"said to have the format prompts .* the fields q\."):
        one(tmp_path, {"q": "x"}, format="prompts")
    plain = tmp_path / "prompts.md"
    plain.write_text("# one\ntwo\n")
    assert len(read(plain, format="prompts")) == 2
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl is said to have the format chat \(OpenAI .*rows have the fields "
        r"instruction, input, output, text\. Name another format",
    ):
        one(tmp_path, row, format="chat")


def test_unknown_schema_shows_fields_and_known_schemas(tmp_path):
    path = write_lines(tmp_path / "odd.jsonl", {"alpha": 1, "beta": 2}, {"gamma": 3})
    with pytest.raises(
        ConfigError,
        match=r"odd.jsonl has no schema that fledge knows: its rows have the fields alpha, beta, "
        r"gamma\. Known are chat: OpenAI .*; bfcl: .* Rename the fields, or leave the file out",
    ):
        read(path)
    with pytest.raises(ConfigError, match=r"rows have no fields \(they are of type int, list\)"):
        read(write_lines(tmp_path / "numbers.jsonl", 1, [2]))
    many = write_lines(tmp_path / "many.jsonl", {f"f{i}": i for i in range(30)})
    with pytest.raises(ConfigError, match=r"fields f0, .*, f19 and more\. Known"):
        read(many)


def test_the_schema_most_rows_have_counts(tmp_path):
    lines = as_lines({"odd": 1}, {"prompt": "a"}, {"prompt": "b"}, {"text": "c"})
    (tmp_path / "mixed.jsonl").write_text("garbage\n" + lines)
    source = reader(tmp_path / "mixed.jsonl")
    assert texts(source) == ["a", "b"]
    assert source.report.bad_by_reason == {"not JSON": 1, "schema": 2}
    assert source.report.bad[1] == ("mixed.jsonl", 2, "field `prompt` has no text in it")
    assert source.report.schemas["mixed.jsonl"] == ("prompts", "prompts from field `prompt`")
