"""The curves of a run: an append-only file of lines, and whoever wants to show them live.

    {"step": 40, "kind": "train", "figures": {"loss": 3.1, ...}, "timing": {"tokens_per_s": ...}}

`curves.jsonl` is the truth; TensorBoard and Weights & Biases get copies, about one training step a
second, since a step of many figures costs them milliseconds. What a clock says stands apart under
`timing`, so that two runs of the same settings have equal lines without it. A line that a kill cut
short is left out when reading and removed before writing goes on.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.store.cache_publish import publish_file
from fledge.training.curve_mirrors import Mirror, open_mirrors
from fledge.training.metrics import Figure

CURVES_NAME = "curves.jsonl"
Kind = Literal["train", "held_out", "decode"]
_MIRRORED_EVERY_S = 1.0
_TRAIN_MARK = b'"kind": "train"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRecord:
    """What was measured at one step."""

    step: int
    kind: Kind
    figures: Mapping[str, Figure]
    timing: Mapping[str, Figure] = field(default_factory=dict)


class CurveLog:
    """Appends to the curves of a run directory; one process writes."""

    def __init__(
        self, directory: Path, *, progress: Progress | None = None, is_mirrored: bool = True
    ) -> None:
        """Goes on behind the last whole line; `is_mirrored` also feeds TensorBoard and such."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._path = directory / CURVES_NAME
        self._progress = progress or SilentProgress()
        self._is_mirrored = is_mirrored
        self._mirrors: list[Mirror] | None = None
        self._purged_from: int | None = None
        self._mirrored_s = -math.inf
        _drop_torn_line(self._path)
        self._file = self._path.open("ab")

    def add(
        self,
        step: int,
        kind: Kind,
        figures: Mapping[str, Figure],
        timing: Mapping[str, Figure] | None = None,
    ) -> None:
        """One line, on its way to the disk before this returns."""
        record = CurveRecord(
            step=step, kind=kind, figures=_finite(figures), timing=_finite(timing or {})
        )
        self._file.write(_line(record))
        self._file.flush()
        now = time.monotonic()
        if kind != "train" or now - self._mirrored_s >= _MIRRORED_EVERY_S:
            self._mirrored_s = now if kind == "train" else self._mirrored_s
            for mirror in self._opened_mirrors():
                mirror.add(record.step, record.kind, {**record.figures, **record.timing})

    def truncate_after(self, step: int) -> None:
        """Forget what lies behind a step: training goes on from its checkpoint."""
        records = read_curves(self._directory)
        kept = [record for record in records if record.step <= step]
        self._close_mirrors()
        self._purged_from = step + 1
        if len(kept) == len(records):
            return
        self._file.close()
        publish_file(self._path, b"".join(map(_line, kept)))
        self._file = self._path.open("ab")

    def close(self) -> None:
        self._file.close()
        self._close_mirrors()

    def __enter__(self) -> "CurveLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened_mirrors(self) -> list[Mirror]:
        """Opened at the first line: only then is it known from where older ones are void."""
        if self._mirrors is None:
            self._mirrors = (
                open_mirrors(self._directory, self._purged_from, self._progress)
                if self._is_mirrored
                else []
            )
        return self._mirrors

    def _close_mirrors(self) -> None:
        for mirror in self._mirrors or ():
            mirror.close()
        self._mirrors = None


def read_curves(directory: Path, *, most_steps: int | None = None) -> list[CurveRecord]:
    """All whole lines of a run's curves; none when there is no file.

    `most_steps` leaves out training steps evenly, so that about so many remain, the newest among
    them; what is left out is not even parsed.
    """
    path = directory / CURVES_NAME
    content = path.read_bytes() if path.exists() else b""
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    return [_parse(path, number, lines[number]) for number in _chosen(lines, most_steps)]


def _chosen(lines: Sequence[bytes], most_steps: int | None) -> Sequence[int]:
    if most_steps is None:
        return range(len(lines))
    steps = [number for number, line in enumerate(lines) if _TRAIN_MARK in line]
    stride = max(1, -(-len(steps) // most_steps))
    kept = {*steps[::-stride]}
    left_out = {number for number in steps if number not in kept}
    return [number for number in range(len(lines)) if number not in left_out]


def _parse(path: Path, number: int, line: bytes) -> CurveRecord:
    try:
        return CurveRecord(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged in line {number + 1}; remove the line, or the file: only the "
            "curves are lost."
        ) from error


def _line(record: CurveRecord) -> bytes:
    document = {
        "step": record.step,
        "kind": record.kind,
        "figures": dict(record.figures),
        "timing": dict(record.timing),
    }
    return json.dumps(document, allow_nan=False).encode() + b"\n"


def _finite(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """JSON has neither NaN nor infinity: such a figure is one that could not be measured."""

    def clean(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        name: [clean(one) for one in value] if isinstance(value, list) else clean(value)
        for name, value in figures.items()
    }


def _drop_torn_line(path: Path) -> None:
    """Cut off what a kill left behind the last line end."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
