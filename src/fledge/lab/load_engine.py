"""Loads an engine in this process, without a server: the same figures, less HTTP."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.errors import RequestError
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.request import Prompt, Request
from fledge.engine.sequence import Sequence as Running
from fledge.lab.load_answer import Answer, Failure, Speculation
from fledge.lab.load_driver import ClientLoad, Drive, OnAnswer
from fledge.lab.load_point import Point, send_times_s
from fledge.lab.load_prompts import LoadPrompt

_clock = time.perf_counter


@dataclass(slots=True)
class _Asked:
    """A request in the engine, and when its tokens came."""

    running: Running
    due: float
    sent: float
    text_times: list[float] = field(default_factory=list)
    num_seen: int = 0

    def look(self, now: float) -> None:
        """Take the time of tokens that are new."""
        if len(self.running.output_ids) > self.num_seen:
            self.num_seen = len(self.running.output_ids)
            self.text_times.append(now)

    def answer(self, now: float) -> Answer:
        error = self.running.error
        if error is not None:
            failure = Failure(kind="engine", reason=str(error))
            return Answer(due=self.due, sent=self.sent, end=now, failure=failure)
        stats = self.running.completion().stats
        return Answer(
            due=self.due,
            sent=self.sent,
            text_times=tuple(self.text_times),
            end=now,
            num_tokens=stats.num_tokens,
            num_prompt_tokens=len(self.running.request.prompt_token_ids),
            num_cached_tokens=stats.num_prompt_reused,
            speculation=Speculation(
                cycles=stats.cycles,
                offered_at_depth=stats.offered_at_depth,
                accepted_at_depth=stats.accepted_at_depth,
            ),
        )


class EngineDriver:
    """Feeds one engine between its cycles."""

    def __init__(self, engine: Engine, settings: BenchSettings) -> None:
        self._engine, self._settings = engine, settings
        tokenizer = engine.target.tokenizer
        self._is_chat = (
            settings.api == "chat" and tokenizer is not None and tokenizer.has_chat_template
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"engine": "in process", "tokens": "engine"}

    def drive(
        self,
        point: Point,
        prompts: Sequence[LoadPrompt],
        *,
        max_tokens: int,
        seed: int,
        on_answer: OnAnswer,
    ) -> Drive:
        """Send a request for each prompt, as the load says.

        What is asked is rendered and tokenized before the first is sent: a server does that in
        another process, beside the engine.
        """
        requests = [self._make(prompt, max_tokens) for prompt in prompts]
        arrivals = self._arrivals(point, requests, seed)
        asked: list[_Asked] = []
        answers: list[Answer] = []
        waiting = next(arrivals, None)
        while waiting is not None or asked:
            now = _clock()
            while waiting is not None and waiting[1] <= now and self._has_room(point, asked):
                request, due = waiting
                entry = self._ask(request, now if point.is_closed else due)
                if isinstance(entry, Answer):
                    answers.append(entry)
                    on_answer()
                else:
                    asked.append(entry)
                waiting = next(arrivals, None)
            if not asked:
                if waiting is not None:
                    time.sleep(max(0.0, waiting[1] - _clock()))
                continue
            self._engine.step()
            now = _clock()
            ended = [entry for entry in asked if entry.running.has_ended]
            for entry in asked:
                entry.look(now)
            for entry in ended:
                asked.remove(entry)
                answers.append(entry.answer(now))
                on_answer()
        chunks = sum(len(answer.text_times) for answer in answers)
        return Drive(answers=answers, client=ClientLoad(busy_share=0.0, lag_s=None, chunks=chunks))

    def _arrivals(
        self, point: Point, requests: Sequence[Request | Failure], seed: int
    ) -> Iterator[tuple[Request | Failure, float]]:
        """With the time they are due; in a closed loop that is as soon as there is room."""
        start = _clock()
        if point.is_closed:
            return ((request, start) for request in requests)
        times = send_times_s(point, len(requests), seed)
        return ((request, start + due) for request, due in zip(requests, times, strict=True))

    def _has_room(self, point: Point, asked: Sequence[_Asked]) -> bool:
        return not point.is_closed or len(asked) < point.users

    def _ask(self, request: Request | Failure, due: float) -> _Asked | Answer:
        sent = _clock()
        if isinstance(request, Failure):
            return Answer(due=due, sent=sent, end=_clock(), failure=request)
        return _Asked(self._engine.add(request), due, sent)

    def _make(self, prompt: LoadPrompt, max_tokens: int) -> Request | Failure:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            repetition_penalty=self._settings.repetition_penalty,
            ignore_eos=self._settings.ignore_eos,
            seed=self._settings.seed,
        )
        try:
            return self._engine.make_request(self._prompt(prompt), params)
        except RequestError as error:
            return Failure(kind="refused", reason=str(error))

    def _prompt(self, prompt: LoadPrompt) -> Prompt:
        """A conversation for a target that knows what one is; a text otherwise."""
        if self._is_chat:
            return list(prompt.messages)
        tokenizer = self._engine.target.tokenizer
        assert tokenizer is not None
        return tokenizer.encode_prompt(prompt.text, raw=True)
