"""Pairs made once, engines found in the environments that `make engines` makes."""

import json
import os
from pathlib import Path

import pytest

from fledge.contracts import provenance
from fledge.contracts.head_settings import HeadSettings
from fledge.contracts.outside_engines import OutsideEngine
from fledge.interop.engines.acceptance import our_acceptance
from fledge.interop.engines.installation import InstalledEngine, find_engine
from fledge.interop.engines.job import run_in_engine
from tests.engines import forced_pair, trained_pair
from tests.engines.cases import DEPTH, Case, Outcome, convert_for_openvino, encode, export_for

ENVIRONMENTS = Path(__file__).parents[2] / ".engines"
RESULT_VARIABLE = "FLEDGE_ENGINES_RESULT"
"""Where to write what was counted, as a JSON file."""


def installed(name: OutsideEngine) -> InstalledEngine:
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment of {name}; `make engines` makes it")
    return find_engine(name, python)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def forced(place: Path) -> list[Case]:
    """Every draft is right, provided that the right layers are handed over."""
    target = forced_pair.save_forced_target(place / "forced" / "target")
    circle = forced_pair.CIRCLE
    prompts = tuple(circle[start : start + 5] for start in (0, 4, 13, 22))
    heads = {"default": None, "other": (1, 4, 11)}
    return [
        Case(
            name=f"forced-{name}",
            target=target,
            head=forced_pair.save_forced_head(place / "forced" / name, taps=taps),
            prompts=prompts,
            max_tokens=31,
        )
        for name, taps in heads.items()
    ]


@pytest.fixture(scope="session")
def trained(place: Path) -> list[Case]:
    """Drafts that are right about three times in four."""
    folder = place / "trained"
    target = trained_pair.save_trained_target(folder / "target")
    corpus = trained_pair.save_corpus(folder, target)
    prompts = encode(target, trained_pair.prompts(24))
    heads = {
        "default": ((2, 5, 7), HeadSettings()),
        "other": ((1, 4, 9), HeadSettings()),
        "normed": ((2, 5, 7), HeadSettings(norm_before_fc=True)),
        "twice-normed": ((1, 4, 9), HeadSettings(norm_before_fc=True, norm_before_residual=True)),
    }
    return [
        Case(
            name=f"trained-{name}",
            target=target,
            head=trained_pair.save_trained_head(
                folder / name, target, corpus, taps=taps, head=settings
            ),
            prompts=prompts,
            max_tokens=64,
            has_norms=settings.norm_before_fc,
        )
        for name, (taps, settings) in heads.items()
    ]


@pytest.fixture(scope="session", params=("llamacpp", "vllm", "openvino"))
def engine(request: pytest.FixtureRequest) -> InstalledEngine:
    return installed(request.param)


@pytest.fixture(scope="session")
def outcomes(
    engine: InstalledEngine, forced: list[Case], trained: list[Case], place: Path
) -> dict[str, Outcome]:
    """All cases in one engine, with their heads and without."""
    folder = place / engine.name
    cases = [case for case in forced + trained if case.is_for(engine)]
    folder.mkdir()
    exported = {case.name: export_for(engine, case, folder) for case in cases}
    if engine.name == "openvino":
        convert_for_openvino(engine, cases, folder)
    runs = [case.run(*exported[case.name]) for case in cases]
    plain = [case.run(exported[case.name][0], None) for case in (forced[0], trained[0])]
    answers = run_in_engine(engine, [*runs, *plain], timeout_s=1500)
    without = dict(zip(("forced", "trained"), answers[len(runs) :], strict=True))
    found = {
        case.name: Outcome(case, case.ask_ours(), theirs, without[case.name.split("-")[0]])
        for case, theirs in zip(cases, answers, strict=False)
    }
    record(engine, found)
    return found


def record(engine: InstalledEngine, outcomes: dict[str, Outcome]) -> None:
    """Add what was counted to the file that the environment names."""
    if not (name := os.environ.get(RESULT_VARIABLE)):
        return
    path = Path(name)
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document["provenance"] = provenance.collect(device="CPU, 2 cores")
    document.setdefault("engines", {})[engine.name] = {
        "version": engine.version,
        "cases": {name: as_json(outcome) for name, outcome in outcomes.items()},
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def as_json(outcome: Outcome) -> dict[str, object]:
    theirs = outcome.theirs.acceptance
    ours = our_acceptance(outcome.ours, DEPTH, theirs.counting)
    return {
        "prompts": len(outcome.case.prompts),
        "tokens": outcome.theirs.num_tokens,
        "same_tokens": outcome.theirs.token_ids == tuple(one.token_ids for one in outcome.ours),
        "cycles": {
            "theirs": outcome.theirs.cycles,
            "ours": sum(completion.stats.cycles for completion in outcome.ours),
        },
        "drafts": {"theirs": theirs.num_drafts, "ours": ours.num_drafts},
        "accepted_at_position": {
            "theirs": theirs.accepted_at_position,
            "ours": ours.accepted_at_position,
        },
        "counting": theirs.counting,
    }
