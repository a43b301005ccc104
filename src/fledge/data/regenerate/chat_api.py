"""Questions as OpenAI's request bodies, and response bodies as replies."""

from typing import Any

from fledge.contracts.conversation import AnswerFinish, Message
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.dialogue import Question, Reply
from fledge.data.regenerate.failures import BadDocument, Refused

CHAT_ROUTE = "/chat/completions"
RAW_ROUTE = "/completions"

_FINISH_REASONS: dict[str, AnswerFinish] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
"""The names that servers use; any other, such as `abort`, means that the answer is not whole."""


def route_of(settings: RegenerateSettings) -> str:
    """The path below /v1 that questions go to."""
    return RAW_ROUTE if settings.raw else CHAT_ROUTE


def body_of(question: Question, settings: RegenerateSettings, model: str) -> dict[str, Any]:
    """A request body."""
    body: dict[str, Any] = {"model": model}
    if settings.raw:
        body["prompt"] = raw_prompt(question)
    else:
        body["messages"] = list(question.messages)
        if question.tools:
            body["tools"] = list(question.tools)
    if settings.repetition_penalty is not None:
        body["repetition_penalty"] = settings.repetition_penalty
    return body | {
        "temperature": question.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": question.seed,
    }


def raw_prompt(question: Question) -> str:
    """The text to continue, where no chat template is wanted."""
    messages = question.messages
    content = messages[0].get("content") if len(messages) == 1 else None
    if not isinstance(content, str) or messages[0].get("role") != "user":
        raise Refused(
            "without a chat template only a single user message can be continued, and this "
            f"conversation has {len(messages)} messages"
        )
    return content


def read_reply(document: Any) -> Reply:
    """The reply in a response body, from either route."""
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadDocument("no choices in it")
    choice = choices[0]
    finish_reason = _FINISH_REASONS.get(str(choice.get("finish_reason")))
    if finish_reason is None:
        raise BadDocument(f"finish_reason {choice.get('finish_reason')!r}")
    if "message" in choice:
        message = _read_message(choice["message"])
    elif isinstance(choice.get("text"), str):
        message = {"role": "assistant", "content": choice["text"]}
    else:
        raise BadDocument("neither a message nor a text in it")
    return Reply(message=message, finish_reason=finish_reason)


def _read_message(said: Any) -> Message:
    if not isinstance(said, dict):
        raise BadDocument("a message that is no object")
    content = _text(said.get("content"))
    calls = [_read_call(call, n) for n, call in enumerate(said.get("tool_calls") or ())]
    message: Message = {"role": "assistant", "content": content}
    if content is None and not calls:
        message["content"] = ""
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    raise BadDocument("a content that is neither text nor parts of text")


def _read_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadDocument("a tool call without a function's name")
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"},
    }
