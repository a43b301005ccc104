"""From sums to figures, in the words of the glossary.

    acceptance at depth i    of the chains whose drafts before i were right, those right at i too
    ideal speed-up           1 + a1 + a1 a2 + ... + a1...ad: what curves can promise at most

Teacher-forced: every index of every answer begins a chain, and text stands in for the drafts. On
greedy answers that is what serving does, except that serving begins a chain only where the one
before ended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fledge.training.step_sums import StepSums

Figure = float | list[float | None] | None
"""A number, or one per depth; None where nothing was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthFigures:
    """What some training or held-out positions say about a head, one number per depth."""

    loss: float | None
    """Weighted by step, as it is minimised when the mean is over labels."""

    loss_at_depth: tuple[float | None, ...]
    entropy_at_depth: tuple[float | None, ...]
    """Below which no head could bring the soft cross-entropy."""

    accuracy_at_depth: tuple[float | None, ...]
    """The head's best token is the target's best."""

    acceptance_at_depth: tuple[float | None, ...]
    expected_acceptance_at_depth: tuple[float | None, ...]
    """Sum of min(p, q), both at the temperatures that are taught: what sampling would accept of
    sampled drafts."""

    ideal_speed_up: float | None
    num_labels: int
    """Positions with a label at the first depth."""

    def as_record(self) -> dict[str, Figure]:
        """As curves hold them."""
        return {
            "loss": self.loss,
            "loss_at_depth": list(self.loss_at_depth),
            "entropy_at_depth": list(self.entropy_at_depth),
            "accuracy_at_depth": list(self.accuracy_at_depth),
            "acceptance_at_depth": list(self.acceptance_at_depth),
            "expected_acceptance_at_depth": list(self.expected_acceptance_at_depth),
            "ideal_speed_up": self.ideal_speed_up,
            "num_labels": self.num_labels,
        }


def measure_sums(sums: StepSums, *, step_decay: float) -> DepthFigures:
    """Figures of summed counts; this waits for the device once."""
    values = dict(zip(StepSums._fields, sums.packed().tolist(), strict=True))
    losses = _ratios(values["loss_K"], values["count_K"])
    acceptance = _ratios(values["chain_K"], values["offered_K"])
    return DepthFigures(
        loss=weighted_loss(losses, step_decay),
        loss_at_depth=losses,
        entropy_at_depth=_ratios(values["entropy_K"], values["count_K"]),
        accuracy_at_depth=_ratios(values["correct_K"], values["count_K"]),
        acceptance_at_depth=acceptance,
        expected_acceptance_at_depth=_ratios(values["accepted_K"], values["count_K"]),
        ideal_speed_up=ideal_speed_up(acceptance),
        num_labels=int(values["count_K"][0]),
    )


def ideal_speed_up(acceptance_at_depth: Sequence[float | None]) -> float | None:
    """1 + a1 + a1 a2 + ...; a depth that was never offered ends the chain."""
    if not acceptance_at_depth or acceptance_at_depth[0] is None:
        return None
    total = reached = 1.0
    for acceptance in acceptance_at_depth:
        if acceptance is None:
            break
        reached *= acceptance
        total += reached
    return total


def weighted_loss(losses: Sequence[float | None], step_decay: float) -> float | None:
    """Sum over steps of decay^k times the mean loss at step k; steps without labels add nothing."""
    known = [step_decay**k * loss for k, loss in enumerate(losses) if loss is not None]
    return math.fsum(known) if known else None


def _ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(a / b if b else None for a, b in zip(above, below, strict=True))
