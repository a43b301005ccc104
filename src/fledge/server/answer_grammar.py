"""Grammars of answers: a form the client wants, or calls of the tools it insists on.

Reasoning comes before either and is free. A grammar with reasoning is written in Lark:

    start: reasoning answer
    reasoning[lazy]: /(.|\\n)*<\\/think>/
    answer: %json {...}
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fledge.contracts.errors import ConfigError
from fledge.contracts.grammar import WHITE_SPACE, Grammar
from fledge.models.said import END_THINK, THINK
from fledge.server.api_errors import InvalidRequestError
from fledge.server.call_formats import ARGS, CLOSE_CALL, MISTRAL_CALLS, OPEN_CALL, CallFormat
from fledge.server.target_marks import Reasoning, TargetMarks

_START = "start: "
_ANY_OBJECT = {"type": "object"}
_PLAIN_KINDS = ("type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const")


class AnswerForm(NamedTuple):
    """What the whole answer, behind any reasoning, has to look like."""

    grammar: Grammar
    param: str
    """The parameter that asks for it."""

    is_whole: bool = False
    """It speaks of the whole answer, reasoning and calls included: a grammar of the client."""


class ForcedTool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: dict[str, Any] | None
    is_strict: bool


def make_grammar(kind: Any, text: str, *, param: str, is_lenient: bool = False) -> Grammar:
    """A grammar, or an error that names the parameter."""
    try:
        return Grammar(kind=kind, text=text, is_lenient=is_lenient, source=param)
    except ConfigError as error:
        raise InvalidRequestError(str(error), param=param, code="grammar_too_large") from error


def choice_grammar(choices: Sequence[str], *, param: str) -> Grammar:
    """One of several texts."""
    if not choices or any(not one for one in choices):
        raise InvalidRequestError(f"{param} must name texts, none of them empty.", param=param)
    alternatives = " | ".join(json.dumps(one) for one in choices)
    return make_grammar("lark", _START + alternatives, param=param)


def behind_reasoning(form: AnswerForm, marks: TargetMarks, reasoning: Reasoning) -> Grammar:
    """The form of an answer, with the reasoning that may come before it."""
    if reasoning == "none" or form.is_whole:
        return form.grammar
    body = "answer: " + _form_body(form.grammar)
    return make_grammar("lark", _with_reasoning(body, marks, reasoning), param=form.param)


def _form_body(grammar: Grammar) -> str:
    """A form as the right side of a rule."""
    if grammar.kind == "json_schema":
        return "%json " + _schema_text(json.loads(grammar.text), is_lenient=grammar.is_lenient)
    if grammar.kind == "regex":
        return f"/{_lark_regex(grammar.text)}/"
    return grammar.text.removeprefix(_START)


def calls_grammar(
    tools: Sequence[ForcedTool],
    marks: TargetMarks,
    reasoning: Reasoning,
    *,
    is_parallel: bool,
    form: AnswerForm | None = None,
) -> Grammar:
    """One or more calls of these tools, in the format that the target was taught.

    With a form the target may choose between calls and an answer of that form.
    """
    kind = marks.calls
    assert kind is not None
    rules = ["answer: calls" if form is None else "answer: calls | form"]
    if form is not None:
        rules.append("form: " + _form_body(form.grammar))
    rules.append(_calls_rule(marks, is_parallel=is_parallel))
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        before, behind = _around_arguments(tool.name, kind, marks)
        schema = _schema_text(_object_schema(tool.parameters), is_lenient=not tool.is_strict)
        rules.append(f"call_{number}: {before} arguments_{number} {behind}".rstrip())
        rules.append(f"arguments_{number}: %json {schema}")
    text = _with_reasoning("\n".join(rules), marks, reasoning)
    return make_grammar("lark", text, param="tools")


def _calls_rule(marks: TargetMarks, *, is_parallel: bool) -> str:
    kind = marks.calls
    if kind == "hermes":
        opening, closing = marks.terminal(OPEN_CALL), marks.terminal(CLOSE_CALL)
        one = f'{opening} "\\n" call "\\n" {closing}'
        return f'calls: {one} ("\\n" {one})*' if is_parallel else f"calls: {one}"
    if kind == "llama3":
        return 'calls: call ("; " call)*' if is_parallel else "calls: call"
    mark = marks.terminal(MISTRAL_CALLS)
    if marks.has_args_mark:
        return f"calls: ({mark} call)+" if is_parallel else f"calls: {mark} call"
    more = ' (", " call)*' if is_parallel else ""
    return f'calls: {mark} " "? "[" call{more} "]"'


def _around_arguments(name: str, kind: CallFormat, marks: TargetMarks) -> tuple[str, str]:
    """What stands before and behind the arguments of a call."""
    if kind == "mistral" and marks.has_args_mark:
        return f"{json.dumps(name)} {marks.terminal(ARGS)}", ""
    field = "parameters" if kind == "llama3" else "arguments"
    before = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{field}": '
    return json.dumps(before, ensure_ascii=False), '"}"'


def _with_reasoning(body: str, marks: TargetMarks, reasoning: Reasoning) -> str:
    if reasoning == "none":
        return f"start: answer\n{body}"
    start = "reasoning GAP? answer"
    if reasoning == "possible":
        start = f"({marks.terminal(THINK)} reasoning GAP?)? answer"
    if marks.is_token(END_THINK):
        thoughts = f"reasoning: /(.|\\n)*/ {marks.terminal(END_THINK)}"
    else:
        thoughts = f"reasoning[lazy]: /(.|\\n)*{_lark_regex(re.escape(END_THINK))}/"
    return f"start: {start}\n{thoughts}\nGAP: /[ \\n]{{1,8}}/\n{body}"


def _object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    if not parameters:
        return _ANY_OBJECT
    if not any(kind in parameters for kind in _PLAIN_KINDS):
        return {**_ANY_OBJECT, **parameters}
    return parameters


def _schema_text(schema: dict[str, Any], *, is_lenient: bool) -> str:
    """A schema inside a grammar, which has to carry its options itself."""
    options = {
        "whitespace_pattern": WHITE_SPACE,
        "lenient": is_lenient,
        "coerce_one_of": is_lenient,
    }
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _lark_regex(pattern: str) -> str:
    """A regular expression between slashes, on one line."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")
