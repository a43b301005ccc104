"""What clients may send: OpenAI's parameters, and those that other servers added.

Unknown names are refused, and so are values that would be ignored though they matter. Names that
only tell OpenAI's own service something are taken and have no effect.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from fledge.server.api_errors import InvalidRequestError
from fledge.server.format_requests import FormatFields
from fledge.server.strict_model import StrictModel

MAX_STOPS = 16
_MAX_INT = 2**31 - 1
_Ignored = Annotated[Any, Field(default=None, description="Taken, without effect.")]
_Unsupported = Annotated[Any, Field(default=None, description="Refused.")]
_UNSUPPORTED = ("audio", "functions", "function_call", "moderation", "web_search_options")
_TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage with every chunk."""

    include_obfuscation: _Ignored


class SamplingFields(FormatFields):
    """What chats and completions have in common."""

    model: str
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None

    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Give the ids of the prompt and of the answer too."""

    speculation: bool | None = None
    """False decodes without drafts: the same text, at another speed."""

    return_draft_depths: bool | None = None
    """Give the tokens of the answer one by one, each with the depth at which it was drafted."""

    skip_special_tokens: bool | None = None
    """False writes special tokens into the text too."""

    user: _Ignored
    metadata: _Ignored
    store: _Ignored
    service_tier: _Ignored
    safety_identifier: _Ignored
    prompt_cache_key: _Ignored
    prompt_cache_options: _Ignored
    prompt_cache_retention: _Ignored

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError(
                f"stop has {len(stops)} texts; at most {MAX_STOPS} are allowed.", param="stop"
            )
        return stops

    @property
    def is_usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def is_usage_continuous(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class ContentPart(StrictModel):
    """A part of a message; the target reads text only."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class FunctionCall(StrictModel):
    name: str
    arguments: str = "{}"


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: _Ignored


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: _Ignored
    annotations: _Ignored
    audio: _Ignored
    function_call: _Ignored


class ToolFunction(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: ToolFunction


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`"""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None
    """Variables of the target's chat template, such as `enable_thinking`."""

    reasoning_effort: str | None = None
    prediction: _Ignored
    verbosity: _Ignored
    audio: _Unsupported
    functions: _Unsupported
    function_call: _Unsupported
    moderation: _Unsupported
    web_search_options: _Unsupported

    @property
    def offered_tools(self) -> list[Tool] | None:
        """The tools that the target learns of."""
        return None if self.tool_choice == "none" else self.tools

    def forced_tools(self) -> list[Tool] | None:
        """The tools of which one must be called; None when the target is free."""
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return None
        if not self.tools:
            raise InvalidRequestError(
                "tool_choice asks for a call and there are no tools.", param="tool_choice"
            )
        if choice == "required":
            return self.tools
        if not isinstance(choice, NamedTool):
            raise unsupported(f"tool_choice {choice!r}", "tool_choice")
        name = choice.function.name
        named = [tool for tool in self.tools if tool.function.name == name]
        if not named:
            raise InvalidRequestError(
                f"tool_choice names {name!r}, which is none of the tools.", param="tool_choice"
            )
        return named

    @property
    def may_call_several(self) -> bool:
        """Whether one answer may hold more than one call."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    def check_supported(self) -> None:
        """Refuse what would change the answer if only we could do it."""
        for name in _UNSUPPORTED:
            if getattr(self, name) is not None:
                instead = "; give tools and tool_choice" if name.startswith("function") else ""
                raise unsupported(name + instead, name)
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported(f"modalities {self.modalities}", "modalities")
        self.forced_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is given and logprobs is not true; set both.", param="top_logprobs"
            )


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`"""

    prompt: str | _TokenIds | list[str] | list[_TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Texts or token ids, one for each prompt."""
        given = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return cast(Sequence[str | Sequence[int]], [given] if is_one else given)

    def check_supported(self) -> None:
        """Refuse what would change the answer if only we could do it."""
        if self.echo and self.logprobs is not None:
            raise unsupported("echo together with logprobs", "echo")
        if self.suffix:
            raise unsupported("suffix", "suffix")
        if self.best_of not in (None, self.num_choices):
            raise unsupported("best_of other than n", "best_of")


class TokenizeRequest(StrictModel):
    """`POST /tokenize`: a text as it stands, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None
    return_token_strs: bool = False


def unsupported(what: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(
        f"this server does not support {what}.",
        param=param or what.split()[0],
        code="unsupported_parameter",
    )
