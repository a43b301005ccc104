"""Between the optimizer, whose tensors may lie in parts on several processes, and whole states."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fledge.training.checkpoint import TrainState
from fledge.training.distributed import fill, whole
from fledge.training.optimizer import Optimizer

_HEAD = "head."
"""What the names of a head's weights begin with in the module around it."""


def shown_weights(optimizer: Optimizer) -> dict[str, Tensor]:
    """The whole weights that are measured and saved, by their names in a head."""
    return _gathered(optimizer.shown)


def gather_state(
    optimizer: Optimizer, *, step: int, tokens: int, measures: Mapping[str, Any], is_over: bool
) -> TrainState:
    """Everything there is to go on from; every process has to ask."""
    average = optimizer.average
    moments = {
        name.removeprefix(_HEAD): {kind: whole(one).detach().cpu() for kind, one in kinds.items()}
        for name, kinds in optimizer.moments().items()
    }
    return TrainState(
        step=step,
        tokens=tokens,
        weights=_on_cpu(_gathered(optimizer.weights)),
        moments=moments,
        average=None if average is None else _on_cpu(_gathered(average)),
        measures=measures,
        is_over=is_over,
    )


def restore_state(optimizer: Optimizer, state: TrainState) -> None:
    """The opposite of `gather_state`, with any number of processes."""
    moments = optimizer.moments()
    for name, weight in optimizer.weights.items():
        short = name.removeprefix(_HEAD)
        fill(weight, state.weights[short])
        for kind, moment in moments[name].items():
            fill(moment, state.moments[short][kind])
        if optimizer.average is not None and state.average is not None:
            fill(optimizer.average[name], state.average[short])
    optimizer.set_steps(state.step)


def _gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_HEAD): whole(one).detach() for name, one in tensors.items()}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.cpu() for name, one in tensors.items()}
