"""What `fledge tune` found, as one document: a row for each shape, with intervals."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.contracts.tuned_settings import TUNING_NAME
from fledge.lab.differences import Differences
from fledge.lab.measure import summarise
from fledge.lab.ranking import accept_length, difference, is_distinguishable, rank_heads, speed_up
from fledge.lab.statistics import Interval
from fledge.lab.tune_search import Tried
from fledge.lab.tune_shapes import Shape
from fledge.lab.visit_records import VisitRecord, answers_of
from fledge.lab.visits import PLAIN

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFigures:
    """Rows of what was tried."""

    tried: Tried
    concurrency: Mapping[str, int]
    """Requests in flight, by task as records name it."""

    seed: int
    differences: Mapping[str, Differences] = field(default_factory=dict)

    def document(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        rows = {name: self._row(shape) for name, shape in self.tried.shapes.items()}
        ranked = self._ranked()
        best = ranked[0] if ranked else None
        ties = [name for name in ranked[1:] if best is not None and self._is_tied(best, name)]
        chains = [name for name in ranked if self.tried.shapes[name].is_chain]
        return {
            "schema": SCHEMA,
            **facts,
            "best": rows[best] if best is not None else None,
            "chain": rows[chains[0]] if chains else None,
            "ties": ties,
            "verdict": _verdict(rows, best, ties),
            "plain": self._loads(PLAIN, [*self.tried.screening, *self.tried.final]),
            "rows": list(rows.values()),
        }

    def _ranked(self) -> list[str]:
        """Shapes of the final, fastest first; before the final, those that were tried longest."""
        alive = [name for name in self.tried.shapes if name not in self.tried.failed]
        if self.tried.final:
            records = self.tried.final
            alive = [name for name in alive if name in self.tried.finalists]
        else:
            records = self.tried.screening
            counts = {name: len(self.tried.records_of(name)) for name in alive}
            alive = [name for name in alive if counts[name] == max(counts.values())]
        ranked = rank_heads(records, alive, seed=self.seed)
        return [one.head for one in ranked if one.speed_up is not None]

    def _is_tied(self, best: str, name: str) -> bool:
        records = self.tried.final or self.tried.screening
        found = difference(records, best, name, seed=self.seed)
        return found is not None and not is_distinguishable(found)

    def _row(self, shape: Shape) -> dict[str, Any]:
        name = shape.name
        records = self.tried.records_of(name)
        compared, error = self.differences.get(name), self.tried.failed.get(name)
        state = "tried" if records else "not measured"
        if any(name in record.arms for record in self.tried.final):
            state = "final"
        return {
            **asdict(shape),
            **self._figures(name, records, is_counted=error is None),
            "state": "failed" if error is not None else state,
            "error": error,
            "num_visits": len(records),
            "differences": compared.to_json() if compared is not None else None,
            "loads": self._loads(name, records, is_counted=error is None),
        }

    def _loads(
        self, name: str, records: Sequence[VisitRecord], *, is_counted: bool = True
    ) -> list[dict[str, Any]]:
        """The same figures at each number of requests in flight."""
        found = []
        for load in dict.fromkeys(self.concurrency.values()):
            own = [one for one in records if self.concurrency[one.task] == load]
            figures = self._figures(name, own, is_counted=is_counted)
            found.append({"concurrency": load, **figures})
        return found

    def _figures(
        self, name: str, records: Sequence[VisitRecord], *, is_counted: bool
    ) -> dict[str, Any]:
        if not records or not is_counted:
            return {"accept_length": None, "tokens_per_s": None, "speedup": None, "ci": None}
        seconds = sum(one.arms[name].seconds for one in records)
        total = summarise(answers_of(records, name), seconds=seconds)
        if name == PLAIN:
            return {"tokens_per_s": total.tokens_per_s, "num_answers": total.num_answers}
        faster = speed_up(records, name, seed=self.seed)
        length = accept_length(records, name, seed=self.seed)
        return {
            "accept_length": length.value if length is not None else None,
            "tokens_per_s": total.tokens_per_s,
            "speedup": faster.value if faster is not None else None,
            "ci": _bounds(faster),
        }


def _bounds(interval: Interval | None) -> list[float] | None:
    if interval is None or interval.low is None or interval.high is None:
        return None
    return [interval.low, interval.high]


def _verdict(rows: Mapping[str, Mapping[str, Any]], best: str | None, ties: Sequence[str]) -> str:
    if best is None:
        return "nothing was measured."
    row = rows[best]
    text = f"{best}: {shown(row)} times plain decoding, averaged over tasks"
    if row["ci"] is None:
        text += " (how surely is not known: a task had one prompt only, measured once)"
    elif row["ci"][0] <= 1 <= row["ci"][1]:
        text += ", which is not surely faster"
    if row["speedup"] < 1:
        text += "; this is slower, so serve without a head"
    return f"{text}; it cannot be told apart from: {'; '.join(ties)}." if ties else f"{text}."


def shown(row: Mapping[str, Any]) -> str:
    """`1.84 [1.70, 1.99]`"""
    if row["speedup"] is None:
        return "not measured"
    bounds = "unknown" if row["ci"] is None else "{:.2f}, {:.2f}".format(*row["ci"])
    return f"{row['speedup']:.2f} [{bounds}]"


def read_tuning(directory: Path) -> dict[str, Any]:
    """The document of a directory that `fledge tune` made, finished or not."""
    path = directory / TUNING_NAME
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"there is no {path}; give a directory that `fledge tune` made."
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}. Run `fledge tune` again.") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ArtifactError(f"{path} is no tuning of layout {SCHEMA}; run `fledge tune` again.")
    return document
