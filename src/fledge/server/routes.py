"""The endpoints."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fledge.contracts.toml_settings import to_plain
from fledge.server.answer_response import AnswerResponse
from fledge.server.answer_rules import rules_of
from fledge.server.answers import Answers
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_keys import ANYONE
from fledge.server.api_requests import ChatRequest, CompletionRequest, TokenizeRequest
from fledge.server.chat_shape import ChatShape
from fledge.server.parameters import params_of
from fledge.server.service import Service
from fledge.server.shapes import ChoiceState, CompletionShape, Shape, ShapeOptions
from fledge.server.terms import terms_of

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post("/v1/chat/completions")
async def create_chat(chat: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request)
    service.require_ready()
    service.check_model(chat.model)
    chat.check_supported()
    variables = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
    with service.admit(chat.num_choices, terms_of(request.scope["state"])):
        prompt = await service.prompts.read_chat(chat.messages, chat.offered_tools, variables)
        return _answer(service, request, chat, [prompt])


@router.post("/v1/completions")
async def create_completion(completion: CompletionRequest, request: Request) -> Response:
    """Continue one text, or several."""
    service = _service(request)
    service.require_ready()
    service.check_model(completion.model)
    completion.check_supported()
    several = completion.prompts
    num_answers = len(several) * completion.num_choices
    with service.admit(num_answers, terms_of(request.scope["state"])):
        reader = service.prompts
        prompts = [
            await reader.read_text(one) if isinstance(one, str) else tuple(one) for one in several
        ]
        echoes = None
        if completion.echo:
            echoes = [
                one if isinstance(one, str) else await reader.write_text(one) for one in several
            ]
        return _answer(service, request, completion, prompts, echoes)


def _answer(
    service: Service,
    request: Request,
    asked: ChatRequest | CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str] | None = None,
) -> Response:
    """Check what is asked for each prompt, and answer all of them."""
    orders, choices = [], []
    reader = service.prompts
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens.", param="prompt")
        service.allowance.check_prompt(len(prompt))
        rules = rules_of(asked, reader.marks, reader.reasoning_after(prompt))
        echo = echoes[number] if echoes is not None else ""
        for params in params_of(asked, service.allowance, len(prompt)):
            orders.append((prompt, rules.applied_to(params)))
            choices.append(ChoiceState(prompt, echo))
    if not orders:
        raise InvalidRequestError("there is no prompt to answer.", param="prompt")
    fields = request.state.fields
    fields |= {
        "model": asked.model,
        "stream": bool(asked.stream),
        "prompt_tokens": sum(map(len, prompts)),
        "num_choices": len(orders),
    }
    if service.settings.log_prompts:
        fields["prompt"] = to_plain(asked.model_dump(include={"messages", "prompt"}))
    caller = request.state.caller
    client = caller.name if caller is not ANYONE else str(fields["address"])

    priority = terms_of(request.scope["state"]).priority

    def submit() -> Answers:
        return service.supervisor.submit(orders, client=client, priority=priority)

    return AnswerResponse(
        service,
        submit,
        choices,
        _shape(service, asked, prompts[0]),
        is_stream=bool(asked.stream),
    )


def _shape(
    service: Service, asked: ChatRequest | CompletionRequest, prompt: tuple[int, ...]
) -> Shape:
    is_stream = bool(asked.stream)
    options = ShapeOptions(
        model=asked.model,
        # Of a chat true or false, of a completion a number, 0 included.
        has_logprobs=asked.logprobs is not None and asked.logprobs is not False,
        has_token_ids=bool(asked.return_token_ids),
        has_usage=asked.is_usage_wanted,
        has_usage_always=asked.is_usage_continuous,
        num_choices=asked.num_choices,
        has_origins=bool(asked.return_draft_depths),
    )
    token_text = service.prompts.token_text
    if isinstance(asked, ChatRequest):
        splitting = service.prompts.splitting(asked, service.prompts.reasoning_after(prompt))
        return ChatShape(options, token_text, splitting, is_stream=is_stream)
    return CompletionShape(options, token_text)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The target under its names."""
    service = _service(request)
    return {"object": "list", "data": [_model(service, name) for name in service.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """The target, if it has this name."""
    service = _service(request)
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = service.supervisor.facts
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "fledge",
        "root": service.choice.target,
        "max_model_len": facts.max_tokens if facts is not None else None,
    }


@router.post("/tokenize")
async def tokenize(asked: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a text or a conversation, as the target would read it."""
    service = _service(request)
    service.require_ready()
    if asked.model is not None:
        service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequestError("give either prompt or messages.", param="prompt")
    reader = service.prompts
    with service.admit(1):
        if asked.messages is not None:
            variables = {
                **(asked.chat_template_kwargs or {}),
                "add_generation_prompt": asked.add_generation_prompt,
            }
            ids = await reader.read_chat(asked.messages, asked.tools, variables)
        else:
            ids = await reader.read_text(
                asked.prompt or "", adds_special_tokens=asked.add_special_tokens
            )
    document: dict[str, Any] = {
        "tokens": list(ids),
        "count": len(ids),
        "max_model_len": service.allowance.max_tokens,
    }
    if asked.return_token_strs:
        document["token_strs"] = [reader.token_text.text_of(one) for one in ids]
    return document


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """The server runs."""
    return {"status": "ok", "engine": _service(request).status}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether it can answer now."""
    service = _service(request)
    is_ready = service.status == "ready"
    return JSONResponse({"status": service.status}, status_code=200 if is_ready else 503)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    page = _service(request).metrics.page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/speculation")
async def speculation(request: Request) -> dict[str, Any]:
    """What drafting is set to, what it yields, and what the controller chooses."""
    service = _service(request)
    supervisor = service.supervisor
    facts = supervisor.facts
    document: dict[str, Any] = {
        "object": "speculation",
        "target": service.choice.target,
        "head": str(service.choice.head) if service.choice.head is not None else None,
        "settings": to_plain(service.choice.settings if facts is None else facts.settings),
        "engine": {
            "state": service.status,
            "restarts": supervisor.num_restarts,
            "facts": _plain_facts(service),
        },
    }
    stats = supervisor.stats
    if stats is not None:
        document |= {
            "accept_length": stats.accept_length,
            "acceptance_at_depth": list(stats.acceptance_at_depth),
            "controller": stats.controller,
            "stats": to_plain(stats),
        }
    return document


def _plain_facts(service: Service) -> dict[str, Any] | None:
    facts = service.supervisor.facts
    if facts is None:
        return None
    plain = {**to_plain(facts), "target_dir": str(facts.target_dir)}
    del plain["settings"]
    return plain
