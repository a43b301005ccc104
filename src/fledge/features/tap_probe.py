"""`capture.layers = "auto"`: which layers tell most about the token after next, by a quick fit.

The target reads a small sample of the corpus once. Then, for each choice of layers, a ridge
regression guesses the target's final hidden state one token ahead from what a head would have: the
tapped layers of token t and the embedding of token t+1. What counts is how often the guess has the
target's own choice on top: accuracy at the head's first position. Samples are either fitted or
judged, never both.

    token      x(t)   x(t+1)                    features of t and the embedding of t+1 go in,
    row               final(t+1) -> x(t+2)      the target's choice at row t+1 should come out

Kernels of layers add up, so that each layer's is computed once and a choice costs one solve.

Legend: R rows, S of them fitted, Q of them judged, L layers, D hidden size, C tokens to choose.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.features.probe_rows import ProbeRows, read_probe_rows
from fledge.features.sample_rows import SampleRows
from fledge.features.taps import default_taps_of, full_outputs
from fledge.models.head_config import NUM_DEFAULT_TAPS, default_taps
from fledge.models.target import Target
from fledge.models.target_reading import Readout
from fledge.store.corpus import Corpus

MIN_FITTED, MIN_JUDGED = 100, 50
_GRID = 7
"""Layers that choices are made of."""

RIDGES = (0.03, 0.1, 0.3, 1.0)
"""In units of a row's own kernel; the one that suits the default layers is used for all."""

_LARGEST = 20.0
"""Values this many spreads from the mean are cut: the first tokens of a text have such."""

_STANDARD_ERRORS = 2.0
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class TapScore:
    """How one choice of layers did."""

    taps: tuple[int, ...]
    accuracy: float
    unexplained: float
    """Share of the final states' variance that the guess misses."""

    lead: float
    """Over the default layers, on the same rows."""

    lead_error: float
    """Standard error of the lead."""


@dataclass(frozen=True, slots=True)
class TapProbe:
    """What the probe found."""

    chosen: tuple[int, ...]
    default: tuple[int, ...]
    scores: tuple[TapScore, ...]
    """Best first."""

    num_fitted: int
    num_judged: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The table, for people."""
        lines = [
            f"layers compared by a ridge regression on {self.num_fitted:,} positions, judged on "
            f"{self.num_judged:,} others:",
            "    layers           accuracy   lead over the default",
        ]
        for place, score in enumerate(self.scores):
            if place < _SHOWN or score.taps in (self.default, self.chosen):
                lines.append(self._line(score))
        if len(self.scores) > _SHOWN:
            lines.append(f"    and {len(self.scores) - _SHOWN} that did worse")
        chosen = ", ".join(map(str, self.chosen))
        lines.append(
            f"chosen: {chosen}; the default (d) stays unless another leads by "
            f"{_STANDARD_ERRORS:.0f} standard errors"
        )
        return lines

    def _line(self, score: TapScore) -> str:
        mark = "*" if score.taps == self.chosen else " "
        names = ", ".join(map(str, score.taps)) + (" (d)" if score.taps == self.default else "")
        return (
            f"  {mark} {names:<16} {score.accuracy:>8.1%}   "
            f"{100 * score.lead:+.1f} ± {100 * score.lead_error:.1f} points"
        )


def candidate_taps(config: Any) -> list[tuple[int, ...]]:
    """Choices to compare, the default first: it, the field's, and all of a small grid of layers."""
    num_layers = int(config.num_hidden_layers)
    grid = _evenly(full_outputs(config), _GRID)
    for layer in _evenly(range(1, num_layers + 1), _GRID):
        if len(grid) < min(_GRID, num_layers) and layer not in grid:
            grid.append(layer)
    triples = combinations(sorted(grid), NUM_DEFAULT_TAPS)
    named = [default_taps_of(config), default_taps(num_layers), *triples]
    return list(dict.fromkeys(named))


def probe_taps(
    corpus: Corpus,
    rows: SampleRows,
    target: Target,
    *,
    pass_tokens: int,
    progress: Progress | None = None,
) -> TapProbe:
    """Compare choices of layers of a target on a sample of a corpus."""
    candidates = candidate_taps(target.config)
    layers = sorted({layer for taps in candidates for layer in taps})
    read = read_probe_rows(
        corpus, rows, target, layers, pass_tokens=pass_tokens, progress=progress or SilentProgress()
    )
    return compare_taps(read, target.readout, candidates)


@torch.no_grad()
def compare_taps(
    rows: ProbeRows,
    readout: Readout,
    candidates: Sequence[tuple[int, ...]],
    ridges: Sequence[float] = RIDGES,
) -> TapProbe:
    """Fit and judge every candidate; the first is the default."""
    num_fitted, num_judged = int((~rows.is_judged_R).sum()), int(rows.is_judged_R.sum())
    if num_fitted < MIN_FITTED or num_judged < MIN_JUDGED:
        raise ConfigError(
            f'capture.layers = "auto" fits {MIN_FITTED} labels and judges {MIN_JUDGED} of other '
            f"samples at least, and found {num_fitted} and {num_judged} in the corpus; use "
            '"default", or name the layers.'
        )
    task = _make_task(rows, readout)
    default = candidates[0]
    fits = {ridge: _fit(task, default, ridge) for ridge in ridges}
    ridge = max(fits, key=lambda one: float(fits[one].hits_Q.mean()))
    scores = []
    for taps in candidates:
        hits_Q, unexplained = fits[ridge] if taps == default else _fit(task, taps, ridge)
        difference_Q = hits_Q - fits[ridge].hits_Q
        scores.append(
            TapScore(
                taps=taps,
                accuracy=float(hits_Q.mean()),
                unexplained=unexplained,
                lead=float(difference_Q.mean()),
                lead_error=float(difference_Q.std()) / math.sqrt(num_judged),
            )
        )
    scores.sort(key=lambda score: (-score.accuracy, score.taps))
    best = scores[0]
    is_better = best.lead > _STANDARD_ERRORS * best.lead_error
    return TapProbe(
        chosen=best.taps if is_better else default,
        default=default,
        scores=tuple(scores),
        num_fitted=num_fitted,
        num_judged=num_judged,
    )


class _Task(NamedTuple):
    """What all candidates share."""

    layers: Mapping[int, Tensor]
    """Kernel of each layer, [R, S]."""

    shared_RS: Tensor
    """Kernel of the embedding, and of a constant."""

    final_SD: Tensor
    final_QD: Tensor
    middle_D: Tensor
    """Mean of the final hidden states that are fitted, which is left out of both."""

    is_judged_R: Tensor
    readout: Readout
    token_ids_C: Tensor
    """Every token that the target chose in the sample."""

    greedy_Q: Tensor


class _Fit(NamedTuple):
    hits_Q: Tensor
    """1 where the guess has the target's choice on top, else 0."""

    unexplained: float


def _make_task(rows: ProbeRows, readout: Readout) -> _Task:
    is_fitted_R = ~rows.is_judged_R
    final_SD = rows.final_RD[is_fitted_R].float()
    middle_D = final_SD.mean(dim=0)
    return _Task(
        layers={
            layer: _kernel(features_RD, is_fitted_R) for layer, features_RD in rows.layers.items()
        },
        shared_RS=_kernel(rows.embedding_RD, is_fitted_R) + 1,
        final_SD=final_SD - middle_D,
        final_QD=rows.final_RD[rows.is_judged_R].float() - middle_D,
        middle_D=middle_D,
        is_judged_R=rows.is_judged_R,
        readout=readout,
        token_ids_C=_distinct(rows.greedy_R),
        greedy_Q=rows.greedy_R[rows.is_judged_R],
    )


def _kernel(values_RD: Tensor, is_fitted_R: Tensor) -> Tensor:
    """Products of all rows with the fitted ones, every channel in units of its own spread."""
    values_RD = values_RD.float()
    spread_D, mean_D = torch.std_mean(values_RD[is_fitted_R], dim=0)
    unit_RD = ((values_RD - mean_D) / spread_D.clamp_min(1e-6)).clamp(-_LARGEST, _LARGEST)
    return unit_RD @ unit_RD[is_fitted_R].T / unit_RD.shape[1]


def _fit(task: _Task, taps: tuple[int, ...], ridge: float) -> _Fit:
    kernel_RS = task.shared_RS + sum(task.layers[tap] for tap in taps) / len(taps)
    own_SS = kernel_RS[~task.is_judged_R]
    own_SS.diagonal().add_(ridge)
    weights_SD = torch.cholesky_solve(task.final_SD, torch.linalg.cholesky(own_SS))
    guess_QD = kernel_RS[task.is_judged_R] @ weights_SD
    missed = (guess_QD - task.final_QD).square().sum() / task.final_QD.square().sum()
    dtype = task.readout.weight_VD.dtype
    logits_QC = task.readout.logits((guess_QD + task.middle_D).to(dtype), task.token_ids_C)
    hits_Q = (task.token_ids_C[logits_QC.argmax(dim=-1)] == task.greedy_Q).float()
    return _Fit(hits_Q, float(missed))


def _evenly(layers: Sequence[int], count: int) -> list[int]:
    """At most so many of them, from all over, the last one included."""
    count = min(count, len(layers))
    return [layers[(place + 1) * len(layers) // count - 1] for place in range(count)]


def _distinct(ids_R: Tensor) -> Tensor:
    return torch.tensor(sorted(set(ids_R.tolist())), device=ids_R.device)
