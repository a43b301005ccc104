"""Asks the target in this process, and keeps the token ids as they were sampled.

Requests join and leave the engine between cycles, so its batch stays full until the rows run out.
With the default accept rule an answer depends on its own seed and prompt only, never on its
neighbours, so a resumed run says the same.

The whole answer is text: tool calls and thinking in it are not taken apart. The token ids are what
the target said, whatever the text leaves out.
"""

from typing import Any

from fledge.contracts.errors import ConfigError, RequestError
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.sampling import SamplingParams
from fledge.data.regenerate.chat_api import raw_prompt
from fledge.data.regenerate.dialogue import Dialogue, Question, Reply
from fledge.data.regenerate.failures import Refused
from fledge.data.regenerate.worklist import Worklist
from fledge.data.token_meter import TokenMeter
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.engine.sequence import Sequence
from fledge.models.resolve import target_name
from fledge.models.tokenizer import TargetTokenizer

_WAITING_PER_RUNNING = 1
"""Requests that wait in the engine for each that runs, so that none of its places stays empty."""


class EngineAnswerer:
    """Keeps an engine busy until no row is open."""

    def __init__(self, engine: Engine, target: str, settings: RegenerateSettings) -> None:
        tokenizer = engine.target.tokenizer
        if tokenizer is None:
            raise ConfigError(f"the target {target} has no tokenizer, so it cannot be asked.")
        if not settings.raw and not tokenizer.has_chat_template:
            raise ConfigError(
                f"the target {target} has no chat template, so it cannot read conversations; "
                "`--set regenerate.raw=true` continues single user messages as plain text."
            )
        self.model = target_name(target)
        self.device = str(engine.target.device)
        self.identity: dict[str, Any] = {"model": self.model, "tokenizer": tokenizer.identity}
        self._engine = engine
        self._tokenizer: TargetTokenizer = tokenizer
        self._settings = settings

    def answer(self, worklist: Worklist) -> None:
        """Answer every open row."""
        num_places = self._engine.settings.max_requests * (1 + _WAITING_PER_RUNNING)
        dialogues = worklist.pending()
        meter = TokenMeter(worklist.task, f"asking {self.model}")
        under_way: list[tuple[Dialogue, Sequence]] = []
        try:
            while True:
                while len(under_way) < num_places and (dialogue := next(dialogues, None)):
                    self._start(dialogue, worklist, under_way)
                if not under_way:
                    return
                self._engine.step()
                ended = [one for one in under_way if one[1].finish_reason or one[1].error]
                if ended:
                    under_way = [one for one in under_way if not one[1].has_ended]
                for dialogue, seq in ended:
                    if seq.error is not None:
                        worklist.fail(dialogue, str(seq.error))
                    else:
                        meter.add_ended(seq)
                        worklist.record(dialogue, _reply(seq))
                        self._start(dialogue, worklist, under_way)
                meter.look(seq for _, seq in under_way)
        finally:
            self._engine.abort([seq for _, seq in under_way])

    def _start(
        self,
        dialogue: Dialogue,
        worklist: Worklist,
        under_way: list[tuple[Dialogue, Sequence]],
    ) -> None:
        """Ask the next question of a conversation, if there is one that can be asked."""
        question = dialogue.question
        if question is None:
            return
        try:
            request = self._request(question)
        except (RequestError, Refused) as error:
            worklist.fail(dialogue, str(error))
        else:
            under_way.append((dialogue, self._engine.add(request)))

    def _request(self, question: Question) -> Request:
        if self._settings.raw:
            token_ids = self._tokenizer.encode(raw_prompt(question))
        else:
            token_ids = self._tokenizer.encode_chat(question.messages, question.tools)
        params = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=question.temperature,
            top_p=self._settings.top_p,
            repetition_penalty=self._settings.repetition_penalty,
            seed=question.seed,
        )
        return self._engine.make_request(token_ids, params)


def _reply(seq: Sequence) -> Reply:
    completion = seq.completion()
    return Reply(
        message={"role": "assistant", "content": completion.text},
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
    )
