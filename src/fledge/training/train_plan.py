"""What a run would read, write, need and take, before anything runs. Arithmetic only."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fledge.contracts.train_settings import TrainSettings
from fledge.features.feature_store import FeatureStore
from fledge.models.head_config import HeadConfig
from fledge.models.parameter_count import count_parameters
from fledge.store.corpus import Corpora
from fledge.training.assembly import make_order
from fledge.training.cadence import Cadence
from fledge.training.head_init import count_weights
from fledge.training.kept_readings import KeptShape, KeptSizes
from fledge.training.online import kept_sizes
from fledge.training.order import Division
from fledge.training.train_input import TrainInput

_MASTER_BYTES = 4
_MOMENTS = 2
_RESUMABLE = 2
_ROWS_OF_A_STEP = (10, 2, 4)
"""Numbers that a draft step keeps for the way back: so many hidden sizes, widths of queries with
keys, and MLP widths a token."""

_UNLEARNED = 2 / 3
"""Of the operations of a weight: what a number takes that is multiplied and does not learn."""

_HEAD_SHARE, _TARGET_SHARE = 0.35, 0.5
"""Of the measured speed of a matrix product that training and reading reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """What a run would read, write, need and take."""

    mode: str
    samples: int
    samples_held_out: int
    tokens: int
    """Of all steps."""

    steps: int
    weights: int
    """Numbers in the head."""

    read_bytes: int
    checkpoint_bytes: int
    """Of one checkpoint with its state."""

    stored_bytes: int
    device_bytes: int
    seconds: float | None
    """None where the speed of the device is not known."""


def plan_training(
    given: TrainInput, settings: TrainSettings, *, itemsize: int, flops_per_s: float | None = None
) -> TrainPlan:
    """`itemsize` is that of the precision that products are computed in."""
    division, order = make_order(given, settings)
    config = given.head_config(settings)
    weights = count_weights(config)
    num_taught = settings.head.learned_tokens or config.draft_vocab_size
    rows = num_taught * config.hidden_size if config.turned_rows else 0
    is_offline = isinstance(given.inside, FeatureStore)
    passes = settings.epochs if is_offline else 1
    head_bytes = weights * _MASTER_BYTES
    has_average = settings.optimizer.ema > 0
    state_bytes = (_MOMENTS + has_average) * head_bytes
    num_checkpoints = Cadence(settings, order.num_steps).num_checkpoints
    if settings.keep_checkpoints:
        num_checkpoints = min(num_checkpoints, max(settings.keep_checkpoints, _RESUMABLE) + 1)
    stored = (num_checkpoints + 1) * head_bytes + min(num_checkpoints, _RESUMABLE) * state_bytes
    target = count_parameters(given.config)
    kept = _kept(given, settings, division)
    read_tokens = order.num_tokens if kept is None else int(kept.lengths.sum())
    return TrainPlan(
        mode="features" if is_offline else "online",
        samples=len(division.trained),
        samples_held_out=len(division.held_out),
        tokens=order.num_tokens,
        steps=order.num_steps,
        weights=weights,
        read_bytes=passes * given.stored_bytes,
        checkpoint_bytes=head_bytes + state_bytes,
        stored_bytes=stored,
        device_bytes=(
            # Weights, gradients and what the optimizer remembers; the target; one micro-batch.
            (2 + _MOMENTS + has_average) * head_bytes
            + target.total * itemsize
            + _working_bytes(config, settings, itemsize)
            + rows * _MASTER_BYTES
            + _kept_bytes(kept, config, settings, itemsize)
        ),
        seconds=None
        if flops_per_s is None
        else _head_seconds(order.num_tokens, settings, weights + _UNLEARNED * rows, flops_per_s)
        + _read_seconds(0 if is_offline else read_tokens, target.active, flops_per_s),
    )


def _kept(given: TrainInput, settings: TrainSettings, division: Division) -> KeptSizes | None:
    """What the target reads once, where it does."""
    if not settings.keep_readings or not isinstance(given.inside, Corpora):
        return None
    used = np.union1d(division.trained, division.held_out)
    return kept_sizes(given.inside, given.samples, used)


def _kept_bytes(
    kept: KeptSizes | None, config: HeadConfig, settings: TrainSettings, itemsize: int
) -> int:
    if kept is None:
        return 0
    shape = KeptShape(
        num_taps=config.num_taps,
        hidden_size=config.target_hidden_size,
        format=settings.kept_format,
    )
    return kept.num_bytes(shape, itemsize)


def _working_bytes(config: HeadConfig, settings: TrainSettings, itemsize: int) -> int:
    hidden, turned, width = _ROWS_OF_A_STEP
    of_a_step = (
        hidden * config.hidden_size
        + turned * (config.num_heads + config.num_kv_heads) * config.head_dim
        + width * config.intermediate_size
    )
    features = 2 * config.num_taps * config.target_hidden_size
    return settings.micro_tokens * itemsize * (settings.loss.steps * of_a_step + features)


def _head_seconds(
    tokens: int, settings: TrainSettings, weights: float, flops_per_s: float
) -> float:
    """Two operations a weight and token forward, four backward, at each draft step."""
    loss = settings.loss
    early = loss.early_share if loss.early_steps else 0.0
    steps = early * loss.early_steps + (1 - early) * loss.steps
    return 6 * weights * steps * tokens / (_HEAD_SHARE * flops_per_s)


def _read_seconds(tokens: int, target_weights: int, flops_per_s: float) -> float:
    return 2 * target_weights * tokens / (_TARGET_SHARE * flops_per_s)


def needed_disk(plan: TrainPlan, out: Path) -> int:
    """What is still to be written beside what a run has left behind."""
    there = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return max(plan.checkpoint_bytes, plan.stored_bytes - there)
