"""How much load a measurement makes, and when its requests are sent.

In a closed loop every user waits for an answer before asking again, so a slow server is asked less.
In an open loop requests come when they come: their times are fixed before the first is sent, and
latencies count from those times, so that a server which stalls is charged for everybody it kept
waiting (no coordinated omission).
"""

import random
from dataclasses import dataclass
from typing import Any, Literal

from fledge.contracts.bench_settings import BenchSettings

PointKind = Literal["closed", "poisson", "constant"]


@dataclass(frozen=True, slots=True)
class Point:
    """One load: so many users at once, or so many requests per second."""

    kind: PointKind
    level: float

    @property
    def is_closed(self) -> bool:
        return self.kind == "closed"

    @property
    def users(self) -> int:
        """Requests in flight in a closed loop."""
        return int(self.level)

    @property
    def label(self) -> str:
        if self.is_closed:
            return f"{self.users} at once"
        return f"{self.level:g} requests/s ({self.kind})"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "level": self.users if self.is_closed else self.level}


def points_of(settings: BenchSettings) -> list[Point]:
    """All loads of a run, the light ones first."""
    closed = [Point("closed", level) for level in sorted(settings.concurrency)]
    return closed + [Point(settings.arrivals, rate) for rate in sorted(settings.rates)]


def num_requests(point: Point, settings: BenchSettings) -> int:
    """How many requests a measurement sends."""
    if point.is_closed:
        return max(settings.requests, settings.waves * point.users)
    return settings.requests


def send_times_s(point: Point, count: int, seed: int) -> list[float]:
    """When each request of an open loop is due, counted from the start; the first is due at 0."""
    if point.kind == "constant":
        return [number / point.level for number in range(count)]
    chance = random.Random(f"arrivals {seed} {point.level}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + chance.expovariate(point.level))
    return times[:count]
