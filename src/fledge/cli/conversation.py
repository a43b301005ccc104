"""The turns of a chat: what was said, and how the next message is put to the engine.

A turn enters the conversation when it has an answer, or a part of one; a message that got none
leaves the conversation as it was and is kept for `/retry`.
"""

from typing import TYPE_CHECKING, NamedTuple

from fledge.cli.interrupts import StopRequest
from fledge.cli.render import write_text
from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from fledge.engine.engine import Engine


class Turn(NamedTuple):
    text: str
    completion: Completion | None
    """None when the user stopped the answer."""


class Conversation:
    """One chat with one engine."""

    def __init__(self, engine: "Engine", params: SamplingParams, system: str | None) -> None:
        self._engine, self._params = engine, params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self.unanswered: str | None = None
        """The message `/retry` sends again."""

    @property
    def num_turns(self) -> int:
        return len(self._messages) // 2

    def reset(self) -> None:
        """Forget all turns; the system text and an unanswered message stay."""
        self._messages = []

    def ask(self, message: str) -> Turn:
        """Stream the answer to stdout and remember the turn."""
        self.unanswered = message
        try:
            message.encode()
        except UnicodeEncodeError:
            raise RequestError("the message is not valid UTF-8 text.") from None
        asked = [*self._messages, {"role": "user", "content": message}]
        pieces: list[str] = []
        completion = None
        with StopRequest() as stop:
            for chunk in self._engine.stream([*self._opening, *asked], self._params):
                pieces.append(chunk.text)
                write_text(chunk.text)
                completion = chunk.completion
                if stop.is_set:
                    break
        text = "".join(pieces)
        write_text("\n")
        if text or completion is not None:
            self._messages = [*asked, {"role": "assistant", "content": text}]
            self.unanswered = None
        return Turn(text, completion)
