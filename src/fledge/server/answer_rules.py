"""What an answer must be, and what must be seen of it, from what was asked and of which target."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fledge.contracts.grammar import Grammar
from fledge.contracts.sampling import SamplingParams
from fledge.server.answer_grammar import (
    AnswerForm,
    ForcedTool,
    behind_reasoning,
    calls_grammar,
)
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_requests import ChatRequest, CompletionRequest, Tool
from fledge.server.target_marks import Reasoning, TargetMarks


class AnswerRules(NamedTuple):
    """Rules for the answers to one prompt."""

    grammar: Grammar | None
    shown_token_ids: tuple[int, ...]

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        if self.grammar is None and not self.shown_token_ids:
            return params
        return replace(params, grammar=self.grammar, shown_token_ids=self.shown_token_ids)


def rules_of(
    asked: ChatRequest | CompletionRequest, marks: TargetMarks, reasoning: Reasoning
) -> AnswerRules:
    """`reasoning` is what may come first in the answer to the prompt."""
    is_chat = isinstance(asked, ChatRequest)
    has_tools = isinstance(asked, ChatRequest) and bool(asked.offered_tools)
    shown = marks.shown_token_ids(has_tools=has_tools) if is_chat else ()
    if asked.skip_special_tokens is False:
        shown = tuple(sorted(marks.special_tokens.values()))
    form = asked.form()
    if isinstance(asked, ChatRequest):
        return AnswerRules(_chat_grammar(asked, form, marks, reasoning), shown)
    return AnswerRules(form.grammar if form is not None else None, shown)


def _chat_grammar(
    chat: ChatRequest, form: AnswerForm | None, marks: TargetMarks, reasoning: Reasoning
) -> Grammar | None:
    forced = chat.forced_tools()
    if forced is not None:
        if marks.calls is None:
            raise InvalidRequestError(
                "tool_choice asks for a call and the target's chat template teaches none.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        several = chat.may_call_several
        return calls_grammar(_plain_tools(forced), marks, reasoning, is_parallel=several)
    if form is None:
        return None
    offered = chat.offered_tools
    if offered and marks.calls is not None and not form.is_whole:
        return calls_grammar(
            _plain_tools(offered),
            marks,
            reasoning,
            is_parallel=chat.may_call_several,
            form=form,
        )
    return behind_reasoning(form, marks, reasoning)


def _plain_tools(tools: Sequence[Tool]) -> list[ForcedTool]:
    return [
        ForcedTool(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in tools
    ]
