"""What a measurement needs of whatever it measures: a server behind HTTP, or an engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fledge.contracts.errors import MeasurementError
from fledge.contracts.progress import Progress
from fledge.lab.load_answer import Answer
from fledge.lab.load_point import Point
from fledge.lab.load_prompts import LoadPrompt

OnAnswer = Callable[[], None]


class BenchError(MeasurementError):
    """A load cannot be applied any more; what was measured before is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    """What measuring cost the measurer: where this is much, figures are the client's own."""

    busy_share: float
    """Of the time, what the client's thread spent computing."""

    lag_s: float | None
    """How late the client came to what was due, at the 99th percentile."""

    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One load, applied once."""

    answers: Sequence[Answer]
    client: ClientLoad
    lost: str | None = None
    """Why it was cut short: the server does not answer any more."""


class Driver(Protocol):
    """Applies loads, one after the other."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the results say about the measured: model, how tokens are counted."""

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


class Arm(Protocol):
    """One side of a comparison: plain decoding, or a head, or another server."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a resumed run must agree with."""

    @property
    def is_quick_to_open(self) -> bool:
        """Whether taking turns with other arms before every measurement costs nothing."""

    def opened(self, progress: Progress) -> AbstractContextManager[Driver]:
        """Ready to be measured until the block ends."""
