"""Settings of `fledge select`: what heads are measured on, and how carefully."""

from dataclasses import dataclass, field

from fledge.contracts.data_settings import check_penalty, check_range
from fledge.contracts.errors import ConfigError
from fledge.contracts.settings import CONTROLLERS, ControllerName, TreeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSettings:
    """Every head against plain decoding, on the same prompts, in turns."""

    suites: tuple[str, ...] = ("builtin",)
    """Names, paths or addresses of prompts, as docs/lab.md lists them."""

    prompts: int = 0
    """Most prompts of each task; 0 takes all."""

    max_tokens: int = 256
    """Longest answer."""

    temperature: float = 0.0
    repetition_penalty: float | None = None
    """1 for none; left out, what the target's generation_config.json asks for."""

    seed: int = 0
    """Of sampled answers, of the order of prompts, and of the intervals."""

    concurrency: int = 1
    """Requests in flight."""

    repeats: int = 2
    """How often everything is measured."""

    warm_up: int = 2
    """Visits that every head makes before anything counts."""

    halving: bool = True
    """Give up the slower half of the heads early, again and again."""

    finalists: int = 2
    """Heads that are measured on everything, when halving."""

    tree: TreeSettings = field(default_factory=TreeSettings)
    controller: ControllerName = "adaptive"
    copies: bool = True
    """Draft chains that are copied from the text before; off, all drafts are the head's own."""

    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.suites or not all(name.strip() for name in self.suites):
            raise ConfigError("suites is empty, or has an empty name; `builtin` is always there.")
        check_range("prompts", self.prompts, 0)
        check_range("max_tokens", self.max_tokens, 2)
        check_range("temperature", self.temperature, 0)
        check_penalty(self.repetition_penalty)
        check_range("seed", self.seed, 0)
        check_range("concurrency", self.concurrency, 1, 1024)
        check_range("repeats", self.repeats, 1, 100)
        check_range("warm_up", self.warm_up, 0)
        check_range("finalists", self.finalists, 1)
        if self.controller not in CONTROLLERS:
            raise ConfigError(
                f"controller is {self.controller!r}; it must be one of {CONTROLLERS}."
            )
