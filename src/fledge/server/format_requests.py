"""How clients say what an answer must look like: OpenAI's way, and those of other servers."""

import json
from typing import Annotated, Any

from pydantic import Field

from fledge.server.answer_grammar import AnswerForm, choice_grammar, make_grammar
from fledge.server.api_errors import InvalidRequestError
from fledge.server.strict_model import StrictModel

_ANY_OBJECT = '{"type": "object"}'
_Schema = dict[str, Any] | str


class JsonSchemaFormat(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """`response_format` of OpenAI."""

    type: str
    json_schema: JsonSchemaFormat | None = None

    def form(self) -> AnswerForm | None:
        param = "response_format"
        if self.type == "text":
            return None
        if self.type == "json_object":
            return AnswerForm(make_grammar("json_schema", _ANY_OBJECT, param=param), param)
        if self.type != "json_schema":
            raise InvalidRequestError(
                f"response_format of type {self.type!r} is not supported; take text, json_object "
                "or json_schema.",
                param=param,
                code="unsupported_parameter",
            )
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequestError(
                "response_format of type json_schema needs json_schema.schema.", param=param
            )
        text = json.dumps(self.json_schema.schema_, ensure_ascii=False)
        # OpenAI follows a schema as well as it can unless it is strict.
        grammar = make_grammar(
            "json_schema", text, param=param, is_lenient=not self.json_schema.strict
        )
        return AnswerForm(grammar, param)


class StructuredOutputs(StrictModel):
    """`structured_outputs` of vLLM: one of these."""

    json_: _Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def forms(self, prefix: str) -> list[AnswerForm]:
        """What is asked for; `prefix` stands before the names of the parameters."""
        forms = []
        if self.json_ is not None:
            param = prefix + "json"
            grammar = make_grammar("json_schema", _schema_text(self.json_, param), param=param)
            forms.append(AnswerForm(grammar, param))
        if self.json_object:
            param = prefix + "json_object"
            forms.append(AnswerForm(make_grammar("json_schema", _ANY_OBJECT, param=param), param))
        if self.regex is not None:
            param = prefix + "regex"
            forms.append(AnswerForm(make_grammar("regex", self.regex, param=param), param))
        if self.choice is not None:
            param = prefix + "choice"
            forms.append(AnswerForm(choice_grammar(self.choice, param=param), param))
        if self.grammar is not None:
            param = prefix + "grammar"
            grammar = make_grammar("lark", self.grammar, param=param)
            forms.append(AnswerForm(grammar, param, is_whole=True))
        return forms


class FormatFields(StrictModel):
    """All ways to ask for a form; a request may use one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Annotated[
        Any, Field(default=None, description="Taken, without effect.")
    ]

    def form(self) -> AnswerForm | None:
        """The form that is asked for."""
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        forms = guided.forms("guided_")
        if self.structured_outputs is not None:
            forms += self.structured_outputs.forms("structured_outputs.")
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            forms.append(form)
        if len(forms) > 1:
            names = " and ".join(form.param for form in forms)
            raise InvalidRequestError(
                f"{names} are given; an answer has one form.", param=forms[0].param
            )
        return forms[0] if forms else None


def _schema_text(schema: _Schema, param: str) -> str:
    if isinstance(schema, dict):
        return json.dumps(schema, ensure_ascii=False)
    try:
        document = json.loads(schema)
    except ValueError as error:
        raise InvalidRequestError(f"{param} is no JSON: {error}", param=param) from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{param} must be a JSON schema, an object.", param=param)
    return schema
