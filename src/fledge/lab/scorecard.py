"""What `fledge select` found, as one document: per head, per task, with intervals."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.lab.differences import Differences
from fledge.lab.measure import summarise
from fledge.lab.ranking import (
    accept_length,
    difference,
    is_distinguishable,
    rank_heads,
    speed_up,
)
from fledge.lab.scoring import Scorer
from fledge.lab.statistics import Interval
from fledge.lab.suite_prompts import Check
from fledge.lab.visit_records import VisitRecord, answers_of
from fledge.lab.visits import PLAIN

SCORECARD_NAME = "scorecard.json"
SCHEMA = 1


@dataclass(slots=True)
class Found:
    """Everything that was measured, and what became of the heads."""

    records: list[VisitRecord]
    heads: dict[str, str]
    """Fingerprints by name, in the order they were given."""

    left: list[str]
    """Heads that were measured to the end, or are still in the race."""

    failed: dict[str, str] = field(default_factory=dict)
    """Why, by name."""

    differences: dict[str, Differences] = field(default_factory=dict)


def rank_all(found: Found, *, seed: int) -> list[str]:
    """Those that stayed to the end first, then the others by how long they stayed."""

    def num_visits(head: str) -> int:
        return sum(head in record.arms for record in found.records)

    alive = [name for name in found.heads if name not in found.failed]
    ranked = [one.head for one in rank_heads(found.records, alive, seed=seed)]
    return sorted(ranked, key=lambda name: (name not in found.left, -num_visits(name)))


def make_scorecard(
    found: Found,
    facts: Mapping[str, Any],
    checks: Mapping[str, Check],
    scorer: Scorer,
    *,
    seed: int,
    is_serial: bool,
) -> dict[str, Any]:
    """The document; `checks` are of questions by name, `is_serial` with one request in flight."""
    ranked = rank_all(found, seed=seed)
    has_figures = bool(ranked) and speed_up(found.records, ranked[0], seed=seed) is not None
    best = ranked[0] if has_figures else None
    heads = [
        _head(found, name, best, checks, scorer, rank=rank, seed=seed, is_serial=is_serial)
        for rank, name in enumerate(ranked, start=1)
    ]
    heads += [
        {"rank": None, "name": name, "fingerprint": found.heads[name], "state": "failed"}
        | {"error": error}
        for name, error in found.failed.items()
    ]
    ties = [one["name"] for one in heads if one["rank"] and one["is_tied_with_best"]]
    return {
        "schema": SCHEMA,
        **facts,
        "plain": {
            "tasks": {task: _figures(found, PLAIN, task) for task in _tasks(found, PLAIN)},
            "scores": _scores(found, PLAIN, checks, scorer),
        },
        "heads": heads,
        "best": best,
        "ties": ties,
        "verdict": _verdict(heads, best, ties),
        "scoring_problem": scorer.problem,
    }


def _state(found: Found, name: str) -> str:
    if not _is_measured(found, name):
        return "not measured"
    return "measured" if name in found.left else "given up"


def _is_measured(found: Found, name: str) -> bool:
    return any(name in record.arms for record in found.records)


def _tasks(found: Found, arm: str) -> list[str]:
    return list(dict.fromkeys(one.task for one in found.records if arm in one.arms))


def _head(
    found: Found,
    name: str,
    best: str | None,
    checks: Mapping[str, Check],
    scorer: Scorer,
    *,
    rank: int,
    seed: int,
    is_serial: bool,
) -> dict[str, Any]:
    records = found.records
    behind = None
    if best is not None and name != best:
        behind = difference(records, best, name, seed=seed)
    tasks = {}
    for task in _tasks(found, name):
        own = [record for record in records if record.task == task]
        tasks[task] = {
            "speed_up": _json(speed_up(own, name, seed=seed)),
            "speed_up_before_loops": _json(
                speed_up(own, name, seed=seed, before_loops=True) if is_serial else None
            ),
            "accept_length": _json(accept_length(own, name, seed=seed)),
            "figures": _figures(found, name, task),
        }
    compared = found.differences.get(name)
    return {
        "rank": rank,
        "name": name,
        "fingerprint": found.heads[name],
        "state": _state(found, name),
        "error": None,
        "num_visits": sum(name in record.arms for record in records),
        "speed_up": _json(speed_up(records, name, seed=seed)),
        "speed_up_before_loops": _json(
            speed_up(records, name, seed=seed, before_loops=True) if is_serial else None
        ),
        "accept_length": _json(accept_length(records, name, seed=seed)),
        "behind_best": _json(behind),
        "is_tied_with_best": behind is not None and not is_distinguishable(behind),
        "tasks": tasks,
        "differences": compared.to_json() if compared is not None else None,
        "scores": _scores(found, name, checks, scorer),
    }


def _figures(found: Found, arm: str, task: str) -> dict[str, Any]:
    records = [one for one in found.records if one.task == task and arm in one.arms]
    seconds = sum(one.arms[arm].seconds for one in records)
    return asdict(summarise(answers_of(records, arm), seconds=seconds))


def _scores(
    found: Found, arm: str, checks: Mapping[str, Check], scorer: Scorer
) -> dict[str, dict[str, int]]:
    """Right, wrong and unknown answers of each task that can be checked, first repeat only."""
    scores: dict[str, dict[str, int]] = {}
    first = [one for one in found.records if one.repeat == 0]
    for answer in answers_of(first, arm):
        check = checks.get(answer.question)
        if check is not None and answer.error is None:
            right = scorer.score(check, answer.text)
            name = "unknown" if right is None else "right" if right else "wrong"
            task = scores.setdefault(answer.task, {"right": 0, "wrong": 0, "unknown": 0})
            task[name] += 1
    return scores


def _json(interval: Interval | None) -> dict[str, float | int | None] | None:
    return interval.to_json() if interval is not None else None


def _verdict(heads: Sequence[Mapping[str, Any]], best: str | None, ties: Sequence[str]) -> str:
    if best is None:
        return "nothing was measured."
    found = next(one for one in heads if one["name"] == best)["speed_up"]
    text = f"{best} is the fastest head: {shown(found)} times plain decoding, averaged over tasks"
    if found["low"] is None:
        text += " (how surely is not known: a task had one prompt only, measured once)"
    elif found["low"] <= 1:
        text += ", which is " + ("slower" if found["high"] < 1 else "not surely faster")
    if ties:
        return f"{text}; it cannot be told apart from {', '.join(ties)}."
    others = [one for one in heads if one["rank"] and one["name"] != best]
    return f"{text}; every other head is surely slower." if others else f"{text}."


def shown(interval: Mapping[str, Any] | None, digits: int = 2) -> str:
    """`1.84 [1.70, 1.99]`"""
    if interval is None:
        return "not measured"
    text = f"{interval['value']:.{digits}f}"
    if interval["low"] is None:
        return f"{text} [unknown]"
    return f"{text} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]"


def read_scorecard(directory: Path) -> dict[str, Any]:
    """The scorecard of a directory that `fledge select` made, finished or not."""
    path = directory / SCORECARD_NAME
    try:
        card = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"there is no {path}; give a directory that `fledge select` made."
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}. Run `fledge select` again.") from error
    if not isinstance(card, dict) or card.get("schema") != SCHEMA:
        raise ArtifactError(
            f"{path} is no scorecard of layout {SCHEMA}; run `fledge select` again."
        )
    return card
