"""Writes the answers to one request, whole or as a stream, and notices when its client has gone.

The status of a response is sent with its first piece, so that a request which fails before has the
right one. From then on a failure is an event of the stream.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fledge.server.answers import Answers
from fledge.server.api_errors import ApiError, ClientGoneError, DeadlineError, dump
from fledge.server.client_sender import ClientSender
from fledge.server.service import Service
from fledge.server.shapes import ChoiceState, Shape
from fledge.server.terms import terms_of
from fledge.server.wire import Piece

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say for so long says so: proxies close silent connections."""

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]


class AnswerResponse(Response):
    """The response to a chat or a completion."""

    def __init__(
        self,
        service: Service,
        submit: Callable[[], Answers],
        choices: Sequence[ChoiceState],
        shape: Shape,
        *,
        is_stream: bool,
    ) -> None:
        super().__init__()
        self._service, self._submit = service, submit
        self._choices, self._shape, self._is_stream = choices, shape, is_stream
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = ClientSender(scope, send, self._service.settings.client_timeout_s)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            with self._submit() as answers:
                if terms_of(scope["state"]).has_deadline:
                    self._set_deadline(answers, started)
                watcher = asyncio.create_task(_watch(receive, answers))
                try:
                    await self._write(answers, sender)
                finally:
                    watcher.cancel()
                    self._note(scope)
            self._service.note_duration(loop.time() - started)
        except ApiError as error:
            await self._write_error(error, scope, sender)

    def _set_deadline(self, answers: Answers, started: float) -> None:
        limit_s = self._service.settings.request_timeout_s
        error = DeadlineError(
            f"the answer was not finished within {limit_s:g} s, the limit of this server."
        )
        answers.fail_at(started + limit_s, error)

    async def _write(self, answers: Answers, sender: ClientSender) -> None:
        if self._is_stream:
            await self._write_stream(answers, sender)
        else:
            while not answers.are_over:
                self._keep(answers, await answers.take())
            body = dump(self._shape.whole(self._choices))
            await sender.start(200, [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))])
            await sender.write(body, is_last=True)

    async def _write_stream(self, answers: Answers, sender: ClientSender) -> None:
        answers.stir_every(KEEP_ALIVE_S)
        while not answers.are_over:
            events = []
            pieces = await answers.take()
            for piece in _merged(pieces):
                self._keep(answers, [piece])
                index = answers.choice(piece)
                events.append(self._shape.chunk(index, piece, self._choices))
            if not self._has_begun:
                self._has_begun = True
                await sender.start(200, _EVENT_HEADERS)
            text = b"".join(events) if pieces else b": still working\n\n"
            if text:
                await sender.write(text)
        last = self._shape.last_chunk(self._choices) or b""
        await sender.write(last + b"data: [DONE]\n\n", is_last=True)

    def _keep(self, answers: Answers, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            choice = self._choices[answers.choice(piece)]
            choice.take(piece)
            if piece.finish is not None:
                num_prompt = len(choice.prompt_token_ids)
                self._service.metrics.count_answer(num_prompt, piece.finish.stats)

    async def _write_error(self, error: ApiError, scope: Scope, sender: ClientSender) -> None:
        scope["state"]["error"] = error
        if isinstance(error, ClientGoneError):
            await sender.cut()
        elif self._has_begun:
            await sender.write(b"data: " + dump(error.body) + b"\n\n", is_last=True)
        else:
            body = dump(error.body)
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            length = (b"content-length", b"%d" % len(body))
            await sender.start(error.status, [*_JSON_HEADERS, *headers, length])
            await sender.write(body, is_last=True)

    def _note(self, scope: Scope) -> None:
        """What the log says of the answers."""
        finished = [choice.finish for choice in self._choices if choice.finish is not None]
        fields: dict[str, Any] = scope["state"]["fields"]
        fields["completion_tokens"] = sum(len(choice.token_ids) for choice in self._choices)
        fields["finish_reasons"] = [one.reason for one in finished]
        if len(self._choices) == 1 and finished:
            stats = finished[0].stats
            fields["accept_length"] = stats.accept_length
            fields["tokens_per_s"] = round(stats.tokens_per_s, 3)
            fields["time_to_first_token_s"] = round(stats.time_to_first_token_s, 6)
        if self._service.settings.log_prompts:
            fields["answers"] = [choice.text for choice in self._choices]


async def _watch(receive: Receive, answers: Answers) -> None:
    """Wait until the client has gone, and give its answers up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.fail(ClientGoneError("the client closed the connection."))


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each choice: what piled up while the client was busy goes out together."""
    if len(pieces) == 1:
        return list(pieces)
    found: dict[int, Piece] = {}
    for piece in pieces:
        earlier = found.get(piece.number)
        if earlier is not None:
            piece = Piece(
                piece.number,
                earlier.text + piece.text,
                earlier.token_ids + piece.token_ids,
                None if piece.logprobs is None else (earlier.logprobs or ()) + piece.logprobs,
                piece.finish,
                None if piece.origins is None else (earlier.origins or ()) + piece.origins,
            )
        found[piece.number] = piece
    return list(found.values())
