"""Loads an engine in this process, without a server: the same figures, less HTTP."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.errors import RequestError
from fledge.contracts.sampling import SamplingParams
from fledge.engine.engine import Engine
from fledge.engine.request import Prompt
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
        """Send a request for each prompt, as the load says."""
        arrivals = self._arrivals(point, prompts, seed)
        asked: list[_Asked] = []
        answers: list[Answer] = []
        waiting = next(arrivals, None)
        while waiting is not None or asked:
            now = _clock()
            while waiting is not None and waiting[1] <= now and self._has_room(point, asked):
                prompt, due = waiting
                entry = self._ask(prompt, now if point.is_closed else due, max_tokens)
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
        self, point: Point, prompts: Sequence[LoadPrompt], seed: int
    ) -> Iterator[tuple[LoadPrompt, float]]:
        """Prompts with the time they are due; in a closed loop that is as soon as there is room."""
        start = _clock()
        if point.is_closed:
            return ((prompt, start) for prompt in prompts)
        times = send_times_s(point, len(prompts), seed)
        return ((prompt, start + due) for prompt, due in zip(prompts, times, strict=True))

    def _has_room(self, point: Point, asked: Sequence[_Asked]) -> bool:
        return not point.is_closed or len(asked) < point.users

    def _ask(self, prompt: LoadPrompt, due: float, max_tokens: int) -> _Asked | Answer:
        sent = _clock()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            repetition_penalty=self._settings.repetition_penalty,
            ignore_eos=self._settings.ignore_eos,
            seed=self._settings.seed,
        )
        try:
            request = self._engine.make_request(self._prompt(prompt), params)
        except RequestError as error:
            failure = Failure(kind="refused", reason=str(error))
            return Answer(due=due, sent=sent, end=_clock(), failure=failure)
        return _Asked(self._engine.add(request), due, sent)

    def _prompt(self, prompt: LoadPrompt) -> Prompt:
        """A conversation for a target that knows what one is; a text otherwise."""
        if self._is_chat:
            return list(prompt.messages)
        tokenizer = self._engine.target.tokenizer
        assert tokenizer is not None
        return tokenizer.encode_prompt(prompt.text, raw=True)
