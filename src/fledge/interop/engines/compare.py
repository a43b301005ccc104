"""`--verify` with the engine itself: it must accept about as many drafts as our engine does.

What no reader of files can see shows here: an engine that hands over other layers accepts a tenth
of the first drafts where we accept half.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.dialects import Dialect
from fledge.contracts.errors import MismatchError
from fledge.contracts.progress import Progress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.engine import Engine
from fledge.interop.engines.acceptance import Acceptance, our_acceptance
from fledge.interop.engines.installation import InstalledEngine, engine_title
from fledge.interop.engines.job import EngineAnswers, EngineRun, run_in_engine
from fledge.interop.engines.openvino_models import convert_models, name_layers
from fledge.interop.gguf_export import HEAD_FILE, TARGET_FILE
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target_facts import read_facts

MAX_DIFFERENCE = 0.1
"""Of the share of first drafts accepted; wrong layers cost several times as much."""

_MAX_TOKENS = 64
_PROMPTS = (
    "Name the planets in order and say one thing about each of them.",
    "A baker sells 14 loaves in an hour. How many does he sell in six hours? Explain.",
    "Write a Python function that counts the vowels of a text.",
    "Why is the sky blue? Answer in three sentences.",
    "Write a short letter that thanks a friend for a book.",
    "List five ways to save water in a kitchen.",
    "What is the difference between weather and climate?",
    "Tell the story of a fox who wanted to fly.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """An export that an engine is to run, and what it was made of."""

    engine: InstalledEngine
    to: Dialect
    target: str
    head: Path
    """The head that is exported."""

    depth: int
    progress: Progress

    def __call__(self, export: Path) -> str:
        """Answer the same prompts in both; returns what was found, or refuses the export."""
        return _compare(self, export)


def _compare(trial: Trial, export: Path) -> str:
    engine, depth, progress = trial.engine, trial.depth, trial.progress
    directory = resolve_target(trial.target, progress=progress).directory
    facts = read_facts(directory)
    prompts = tuple(tuple(facts.tokenizer.encode_prompt(text)) for text in _PROMPTS)
    tree = TreeSettings(depth=depth, width=1, budget=depth)
    params = SamplingParams(max_tokens=_MAX_TOKENS, draft_depths=True)
    with (
        tempfile.TemporaryDirectory(prefix="fledge-trial-") as place,
        progress.task(f"running {engine_title(engine.name)}", unit=""),
    ):
        pair = _pair(trial, export, directory, Path(place))
        run = _run(trial, pair, prompts, tuple(sorted(facts.eos_token_ids)))
        (theirs,) = run_in_engine(engine, [run])
    with progress.task("running fledge", unit=""):
        # Others ask the head for every draft.
        settings = EngineSettings(tree=tree, controller="fixed", copies=False)
        ours = Engine.load(trial.target, trial.head, settings).generate(prompts, params)
    counted = our_acceptance(ours, depth, theirs.acceptance.counting)
    texts = [completion.token_ids for completion in ours]
    return _judge(engine, theirs, counted, same=sum(map(_is_equal, theirs.token_ids, texts)))


def _pair(trial: Trial, export: Path, directory: Path, place: Path) -> tuple[Path, Path]:
    """Target and head as the engine is pointed at them."""
    if trial.to == "gguf":
        given = Path(trial.target).expanduser()
        return given if given.is_file() else export / TARGET_FILE, export / HEAD_FILE
    if trial.to == "openvino":
        target, head = place / "target-ir", place / "head-ir"
        convert_models(trial.engine, {directory.absolute(): target, export.absolute(): head})
        name_layers(export, head)
        return target, head
    return directory, export


def _run(
    trial: Trial,
    pair: tuple[Path, Path],
    prompts: tuple[tuple[int, ...], ...],
    eos_token_ids: tuple[int, ...],
) -> EngineRun:
    (target, head), depth = pair, trial.depth
    return EngineRun(
        target=target.absolute(),
        head=head.absolute(),
        tree=TreeSettings(depth=depth, width=1, budget=depth),
        prompts=prompts,
        params=SamplingParams(max_tokens=_MAX_TOKENS),
        eos_token_ids=eos_token_ids,
        dtype=str(pick_dtype("auto", pick_device())).removeprefix("torch."),
        max_model_len=max(map(len, prompts)) + _MAX_TOKENS + depth,
    )


def _judge(engine: InstalledEngine, theirs: EngineAnswers, ours: Acceptance, *, same: int) -> str:
    title = f"{engine_title(engine.name)} {engine.version}"
    shares = f"{_shares(theirs.acceptance)} of its drafts, fledge {_shares(ours)}"
    first, our_first = theirs.acceptance.rates[:1], ours.rates[:1]
    if abs((first[0] or 0.0) - (our_first[0] or 0.0)) > MAX_DIFFERENCE:
        raise MismatchError(
            f"{title} accepts {shares}: it does not run this head as it was trained. Nothing was "
            "kept. Report this."
        )
    return f"{title} accepts {shares}; {same} of {len(theirs.token_ids)} texts are the same"


def _shares(acceptance: Acceptance) -> str:
    return ", ".join("-" if rate is None else f"{rate:.0%}" for rate in acceptance.rates)


def _is_equal(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Some engines leave out the token that ends an answer."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
