"""The stages from prompts to a corpus, as `fledge run` calls them."""

from collections.abc import Iterable, Sequence

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrepareSettings, SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.run_settings import StageName
from fledge.data import prepare, tokenize_stage
from fledge.data.prepare_estimate import estimate_prepare
from fledge.data.regenerate import stage as regenerate_stage
from fledge.data.regenerate.in_process import EngineAnswerer
from fledge.data.regenerate.worklist import Worklist
from fledge.data.self_filter import SelfPromptReport
from fledge.data.self_prompts import SelfPromptWriter
from fledge.models.placement import pick_device
from fledge.models.resolve import resolve_target, target_name
from fledge.models.target_facts import read_facts
from fledge.pipeline.road import Forecast, Road
from fledge.store.manifest import Manifest


def make_conversations(road: Road) -> Manifest:
    return prepare.prepare(
        _prepare_settings(road),
        road.place("prepare"),
        target=road.target,
        self_prompts=_PromptsOfTarget(road),
        progress=road.progress,
        base=road.recipe_path.parent,
    )


def forecast_conversations(road: Road) -> Forecast:
    estimate = estimate_prepare(
        _prepare_settings(road),
        road.place("prepare"),
        base=road.recipe_path.parent,
        progress=road.progress,
    )
    is_timed = all(source.seconds is not None for source in estimate.sources)
    return Forecast(
        work=f"about {estimate.output_rows:,} rows"
        + ("" if is_timed else ", some of them written by the target"),
        written_bytes=estimate.output_bytes,
        seconds=estimate.seconds if is_timed else None,
    )


def _prepare_settings(road: Road) -> PrepareSettings:
    if road.recipe.prepare is None:
        raise ConfigError(
            f"the recipe {road.recipe_path} has no [prepare] table; add one with sources, or leave "
            "the stage out of run.stages."
        )
    return road.recipe.prepare


class _PromptsOfTarget:
    """Prompts for sources with the path `self`; the target is loaded when the first is wanted."""

    def __init__(self, road: Road) -> None:
        self._road = road
        self._writer: SelfPromptWriter | None = None

    def __call__(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        examples: Sequence[str],
    ) -> Iterable[Conversation]:
        if self._writer is None:
            journal = self._road.place("prepare") / prepare.WORK_NAME / "self"
            engine = self._road.load_engine(self._road.recipe.regenerate.engine)
            journal.mkdir(parents=True, exist_ok=True)
            self._writer = SelfPromptWriter(engine, progress=self._road.progress, journal=journal)
        return self._writer(source, settings, seed, examples)

    def report(self, source_name: str) -> SelfPromptReport:
        assert self._writer is not None, "no prompt was asked for"
        return self._writer.report(source_name)


def make_answers(road: Road) -> Manifest:
    return regenerate_stage.regenerate(
        road.place("prepare"),
        road.place("regenerate"),
        road.recipe.regenerate,
        _AnswersOfTarget(road),
        progress=road.progress,
    )


def forecast_answers(road: Road) -> Forecast:
    preview = regenerate_stage.preview(
        road.place("prepare"),
        road.place("regenerate"),
        road.recipe.regenerate,
        progress=road.progress,
    )
    return Forecast(
        work=f"{preview.questions:,} questions about {preview.rows_to_ask:,} rows",
        written_bytes=preview.needed_bytes,
    )


class _AnswersOfTarget:
    """Answers in this process; the target's weights are loaded when the first is wanted."""

    def __init__(self, road: Road) -> None:
        resolved = resolve_target(road.target, progress=road.progress)
        self.model = target_name(road.target)
        self.device = str(pick_device(road.device))
        self.identity = {
            "model": self.model,
            "tokenizer": read_facts(resolved.directory).tokenizer.identity,
        }
        self._road = road
        self._answerer: EngineAnswerer | None = None

    def answer(self, worklist: Worklist) -> None:
        settings = self._road.recipe.regenerate
        if self._answerer is None:
            engine = self._road.load_engine(settings.engine)
            self._answerer = EngineAnswerer(engine, self._road.target, settings)
        self._answerer.answer(worklist)


def source_of_corpus(road: Road) -> tuple[StageName, ...]:
    """Answers of the target, or, where they are taken as recorded, the conversations."""
    is_recorded = road.recipe.tokenize.as_recorded and not road.has("regenerate")
    return ("prepare",) if is_recorded else ("regenerate",)


def make_corpus(road: Road) -> Manifest:
    return tokenize_stage.tokenize(_tokenize_job(road), road.place("tokenize"), road.progress)


def forecast_corpus(road: Road) -> Forecast:
    estimate = tokenize_stage.estimate_job(_tokenize_job(road), road.progress)
    return Forecast(
        work=f"about {estimate.samples:,} samples, {estimate.tokens:,} tokens",
        written_bytes=estimate.stored_bytes,
        seconds=estimate.seconds,
    )


def _tokenize_job(road: Road) -> tokenize_stage.TokenizeJob:
    (source,) = source_of_corpus(road)
    return tokenize_stage.prepare_job(
        road.place(source), road.target, road.recipe.tokenize, road.progress
    )
