"""What the server and its engine process say to each other.

Frames on a socket pair that only the two of them hold: four bytes of length, then a pickle. Both
ends run the same code, and nobody else can write to it.
"""

import pickle
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fledge.contracts.outputs import EngineStats, FinishReason, Stats, TokenLogprobs
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings
from fledge.contracts.tuned_settings import TunedSettings

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Which engine to run: the first message the engine process gets."""

    target: str
    head: Path | None
    dtype: str
    device: str
    settings: EngineSettings
    tuned: Mapping[str, TunedSettings] = field(default_factory=dict)
    """How to draft where the settings do not say, by kind of device."""


class Submit(NamedTuple):
    """Answer this."""

    number: int
    """How both sides call the request."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    client: str
    """Clients take turns."""

    priority: int = 0
    """Higher ones go first."""


class Cancel(NamedTuple):
    """Nobody waits for these any more."""

    numbers: tuple[int, ...]


class Compiled(NamedTuple):
    """The grammar of a request is known now, or will never be."""

    number: int
    error: str | None


Order = Submit | Cancel | Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the server must know of a loaded engine."""

    process_id: int
    target_dir: Path
    device: str
    dtype: str
    context_len: int
    max_tokens: int
    """Prompt and answer together: what context and cache memory both hold."""

    max_requests: int
    settings: EngineSettings
    """As the engine runs, tuned for the device it found."""


class Ready(NamedTuple):
    """The engine is loaded."""

    facts: EngineFacts


class LoadFailure(NamedTuple):
    """The engine could not be loaded, and would not be the next time either."""

    message: str
    exit_code: int


class Note(NamedTuple):
    """A line for the log."""

    level: int
    text: str


class Finish(NamedTuple):
    reason: FinishReason
    stats: Stats


class TokenOrigin(NamedTuple):
    """How one token of an answer came."""

    text: str
    """What is known with it: nothing where it ends inside a character."""

    draft_depth: int
    """0 for the target's own."""


class Piece(NamedTuple):
    """A part of an answer."""

    number: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: Finish | None
    origins: tuple[TokenOrigin, ...] | None = None
    """One for each token, when the request asked for them; their texts are the text."""


class Refusal(NamedTuple):
    """There will be no (further) answer to this request."""

    number: int
    message: str
    is_clients_fault: bool
    param: str | None = None
    """The parameter that is at fault."""


class Report(NamedTuple):
    """What one turn of the engine brought, for all requests together."""

    events: list[Piece | Refusal]
    stats: EngineStats | None


News = Ready | LoadFailure | Note | Report


def pack(message: Any) -> bytes:
    """A message as one frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Messages out of bytes that arrive in any portions."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that became whole."""
        self._bytes += data
        found = []
        start = 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            stop = start + _LENGTH.size + length
            if len(self._bytes) < stop:
                break
            found.append(pickle.loads(self._bytes[start + _LENGTH.size : stop]))
            start = stop
        del self._bytes[:start]
        return found


def messages(connection: socket.socket) -> Iterator[Any]:
    """Messages of a blocking socket until the other side has gone."""
    buffer = FrameBuffer()
    while data := connection.recv(1 << 16):
        yield from buffer.feed(data)
