"""Settings of `fledge tune`: which shapes of draft tree are tried, and how carefully."""

from dataclasses import dataclass
from itertools import pairwise

from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import CONTROLLERS, ControllerName, TreeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """One head against plain decoding, with many shapes of tree."""

    suites: tuple[str, ...] = ("builtin",)
    """Names, paths or addresses of prompts, as docs/lab.md lists them."""

    prompts: int = 4
    """Most prompts of each task; 0 takes all."""

    max_tokens: int = 128
    """Longest answer."""

    temperature: float = 0.0
    repetition_penalty: float | None = None
    """1 for none; left out, what the target's generation_config.json asks for."""

    seed: int = 0
    """Of sampled answers, of the order of prompts, and of the intervals."""

    concurrency: tuple[int, ...] = (1,)
    """Requests in flight; of several, the shape that is fastest on average is best."""

    repeats: int = 2
    """How often the final measures everything."""

    warm_up: int = 2
    """Visits that every shape makes before anything counts."""

    depths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9, 10)
    widths: tuple[int, ...] = (1, 2, 4, 8)
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    """What is tried, in growing order: every second value first, then those beside the best. A
    chain (width 1) has its depth as budget."""

    controllers: tuple[ControllerName, ...] = ("fixed", "adaptive")
    """Who decides in each cycle; shapes are compared with the first, the final has all."""

    copies: bool = True
    """Draft chains that are copied from the text before; off, all drafts are the head's own."""

    rounds: int = 3
    """How often the neighbours of the best shape are tried, at most."""

    finalists: int = 2
    """Shapes that are measured on everything, with each controller."""

    together: int = 8
    """Shapes that take turns beside one loaded target; fewer need less memory."""

    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("depths", 1, 64), ("widths", 1, 64), ("budgets", 1, 1024), ("concurrency", 1, 1024),
        ):  # fmt: skip
            _check_growing(name, getattr(self, name), low, high)
        if 1 not in self.widths and self.budgets[-1] < self.depths[0]:
            raise ConfigError(
                f"budgets end at {self.budgets[-1]} and depths begin at {self.depths[0]}; a budget "
                "must hold a path of the tree, so raise budgets or lower depths."
            )
        check_range("rounds", self.rounds, 0)
        check_range("finalists", self.finalists, 1, 16)
        check_range("together", self.together, 1, 64)
        if not self.controllers or len(set(self.controllers)) < len(self.controllers):
            raise ConfigError(
                f"controllers is {self.controllers}; name one of {CONTROLLERS}, or both."
            )
        for controller in self.controllers:
            self.measuring(TreeSettings(), controller)

    def measuring(
        self, tree: TreeSettings | None = None, controller: ControllerName | None = None
    ) -> SelectSettings:
        """How one shape is measured, with memory for the highest load."""
        return SelectSettings(
            suites=self.suites,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            concurrency=max(self.concurrency),
            repeats=self.repeats,
            warm_up=self.warm_up,
            tree=tree or TreeSettings(),
            controller=controller or self.controllers[0],
            copies=self.copies,
            dtype=self.dtype,
        )


def _check_growing(name: str, values: tuple[int, ...], low: int, high: int) -> None:
    if not values or any(one >= other for one, other in pairwise(values)):
        raise ConfigError(f"{name} is {list(values)}; name at least one value, in growing order.")
    for value in values:
        check_range(name, value, low, high)
