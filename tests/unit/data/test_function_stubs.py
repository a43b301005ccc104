"""Described functions as stubs to complete, asked for as the lab asks for HumanEval's."""

from typing import Any

import pytest

from fledge.data.sources.function_stubs import make_stub
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.schemas import schema_of
from fledge.lab.suite_rows import read_row

ROW = {
    "task_id": 3,
    "text": "Write a python function to find the largest of all numbers that are there.",
    "code": "import math\r\nfrom re import sub\r\nK = 3\r\ndef other(x):\r\n  return x\r\n"
    "def largest(xs, *, least=0): \r\n\treturn max(xs) + other(0)",
    "test_list": [
        "assert largest([1,2], least = -1)==2",
        "assert set(largest([2])) == {2}",
        "assert largest( [5] ) == 5",
    ],
}
STUB = '''import math
from re import sub


def largest(xs, *, least=0):
    """Find the largest of all numbers that are there.
    >>> largest([1, 2], least=-1)
    2
    >>> largest([5])
    5
    """'''


def stub_of(**changes: Any) -> str:
    row: dict[str, Any] = {**ROW, **changes}
    return make_stub(row["text"], row["code"], row["test_list"])


def test_a_stub_has_imports_signature_and_examples() -> None:
    assert stub_of() == STUB


def test_the_description_is_wrapped_and_cannot_end_the_docstring() -> None:
    text = 'Say """so""" ' + "and go on " * 20
    lines = stub_of(text=text, code="def largest(xs): pass").splitlines()
    assert lines[1].startswith("    \"\"\"Say '''so''' and go on")
    assert all(len(line) <= 100 for line in lines)


def test_it_is_asked_for_as_the_lab_asks() -> None:
    schema = schema_of(ROW, "completions")
    assert schema is not None
    (draft,) = schema.parse(ROW)
    suite_row = {"task_id": "1", "prompt": STUB + "\n", "entry_point": "largest", "test": "pass"}
    asked = read_row(suite_row, place="1", default_task="code")
    assert draft.messages == asked.messages()


def test_it_is_read_as_a_prompt_where_nothing_else_is_asked_for() -> None:
    schema = schema_of(ROW, "auto")
    assert schema is not None
    assert schema.sentence == "prompts from field `text`"
    assert schema_of({"text": "Hello"}, "completions") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "def largest(:"}, "field `code` is no Python code"),
        ({"test_list": ["assert ("]}, "field `test_list` is no Python code"),
        ({"test_list": ["assert smallest([1]) == 1"]}, "no function that field `test_list` calls"),
    ],
)
def test_rows_that_are_no_functions_are_bad(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RowProblem) as found:
        stub_of(**changes)
    assert message in found.value.detail


@pytest.mark.parametrize("changes", [{"code": None}, {"text": 3}, {"test_list": "assert f()"}])
def test_rows_without_its_fields_are_bad(changes: dict[str, Any]) -> None:
    schema = schema_of(ROW, "completions")
    assert schema is not None
    with pytest.raises(RowProblem) as found:
        schema.parse({**ROW, **changes})
    assert "no texts in fields `text`, `code` and `test_list`" in found.value.detail
