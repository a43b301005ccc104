"""What all stages of one run share, and what each of them is to the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.progress import Progress
from fledge.contracts.recipe import Recipe
from fledge.contracts.run_settings import StageName
from fledge.contracts.settings import EngineSettings
from fledge.engine.engine import Engine
from fledge.store.manifest import MANIFEST_NAME, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """One recipe, and the directory below which every stage has its own."""

    recipe: Recipe
    recipe_path: Path
    """Relative paths in the recipe start at its directory."""

    assignments: tuple[str, ...] = ()
    """What `--set` changed, for stages that are started as processes of their own."""

    out: Path
    command: str
    """What a user types to go on."""

    device: str = "auto"
    dtype: str = "auto"
    progress: Progress

    @property
    def target(self) -> str:
        return self.recipe.target

    @property
    def stages(self) -> tuple[StageName, ...]:
        return self.recipe.run.ordered_stages

    def place(self, stage: StageName) -> Path:
        return self.out / stage

    def has(self, stage: StageName) -> bool:
        return stage in self.recipe.run.stages

    def is_finished(self, stage: StageName) -> bool:
        return (self.place(stage) / MANIFEST_NAME).exists()

    def load_engine(self, settings: EngineSettings) -> Engine:
        with self.progress.task(f"loading {self.target}", unit=""):
            engine = Engine.load(
                self.target,
                settings=settings,
                device=self.device,
                dtype=self.dtype,
                progress=self.progress,
            )
        engine.capture_ahead(self.progress)
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a stage would do, as far as it can say."""

    work: str
    written_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One entry of the road."""

    name: StageName
    reads: Callable[[Road], tuple[StageName, ...]]
    """Stages whose directories have to be finished first."""

    make: Callable[[Road], Manifest | None]
    """Makes what is missing; refuses a directory of other settings. A page has no manifest."""

    forecast: Callable[[Road], Forecast]
