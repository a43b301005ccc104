"""Settings of `fledge run`: which stages of the road are made, and what comes out at its end."""

from dataclasses import dataclass
from typing import Literal

from fledge.contracts.dialects import Dialect
from fledge.contracts.errors import ConfigError

StageName = Literal[
    "prepare",
    "regenerate",
    "tokenize",
    "capture",
    "train",
    "select",
    "tune",
    "bench",
    "export",
    "report",
]
STAGES: tuple[StageName, ...] = (
    "prepare",
    "regenerate",
    "tokenize",
    "capture",
    "train",
    "select",
    "tune",
    "bench",
    "export",
    "report",
)
"""In the order in which they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The road that `fledge run` takes."""

    stages: tuple[StageName, ...] = STAGES
    """Those to make; without `capture` the head is trained beside the live target."""

    exports: tuple[Dialect, ...] = ("vllm",)
    """Formats in which the head leaves."""

    processes: int = 1
    """Of training, one for each GPU; more than one are started by torchrun."""

    bench_offline: bool = False
    """Measure the engine in this process instead of a server."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError(f"stages is empty; name some of {', '.join(STAGES)}.")
        for name in ("stages", "exports"):
            given = getattr(self, name)
            twice = next((one for one in given if given.count(one) > 1), None)
            if twice is not None:
                raise ConfigError(f"{name} names {twice} twice; name it once.")
        if "export" in self.stages and not self.exports:
            raise ConfigError(
                "exports is empty; name a format, or leave the stage export out of stages."
            )
        if not 1 <= self.processes <= 1024:
            raise ConfigError(f"processes is {self.processes}; it must be between 1 and 1024.")

    @property
    def ordered_stages(self) -> tuple[StageName, ...]:
        """In the order of the road, however they were named."""
        return tuple(name for name in STAGES if name in self.stages)
