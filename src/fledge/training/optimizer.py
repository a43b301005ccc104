"""AdamW or Muon on float32 weights, a learning rate by the step, and an average.

Nothing here waits for the device: the norm of the gradient stays there until somebody reads it.
Given graphs, clipping and moving the weights are captured and replayed. Gradients then have memory
of their own that is cleared after every step, and the learning rate lies beside the weights.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from fledge.contracts.train_settings import OptimizerSettings
from fledge.engine.graphs import Graphs
from fledge.training.distributed import own_part, whole
from fledge.training.muon import MOMENTUM, Muon

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW remembers of each weight."""

_READ_OUT = "lm_head."
"""Rows of tokens: their directions are not to be made equally long, so AdamW learns them."""

_AVERAGE_WARMUP = 10
_SKIPPED = "found_inf"
"""Where torch's optimizers look for a flag on the device that makes a step do nothing."""


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Of a step counted from 0: a line up to the full rate, then half a cosine down."""
    warmup = math.ceil(settings.warmup * num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.learning_rate * (settings.min_ratio + (1 - settings.min_ratio) * cosine)


def average_decay(decay: float, step: int) -> float:
    """Of the average after a step counted from 0: short at first, to forget the start."""
    return min(decay, (1 + step) / (_AVERAGE_WARMUP + step))


class Optimizer:
    """The weights of one module, and everything that is remembered about them."""

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        num_steps: int,
        *,
        is_fused: bool | None = None,
        units: Mapping[str, Tensor] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """`is_fused` runs each step as one kernel; None does so on a GPU.

        `units` are powers of two, one for each column of some weights, by the weights' names: those
        are learned as multiples of them.
        """
        self._settings = settings
        self._num_steps = num_steps
        self.weights = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._list: list[Tensor] = list(self.weights.values())
        assert all(one.dtype is torch.float32 for one in self._list), "masters are float32"
        self._is_fused = self._list[0].is_cuda if is_fused is None else is_fused
        self._graphs = graphs
        device = self._list[0].device
        self._is_skipped = torch.zeros((), device=device)
        self._rate = torch.zeros((), device=device)
        if self._graphs is not None:
            for one in self._list:
                one.grad = torch.zeros_like(one)
        by_muon = {
            name: one
            for name, one in self.weights.items()
            if settings.kind == "muon" and one.dim() == 2 and _READ_OUT not in name
        }
        self._muon = Muon(list(by_muon.values()), settings.muon_decay)
        self._momenta = dict(zip(by_muon, self._muon.momenta, strict=True))
        others = [(name, one) for name, one in self.weights.items() if name not in by_muon]
        self._adamw = AdamW(
            _with_and_without_decay(others, settings.weight_decay),
            lr=settings.learning_rate if self._graphs is None else self._rate,
            betas=(settings.betas[0], settings.betas[1]),
            fused=self._is_fused,
            foreach=False,
            capturable=self._graphs is not None and self._list[0].is_cuda,
        )
        if self.skips_bad_steps:
            # Where the host learns of it too late, the kernel itself leaves the weights alone.
            setattr(self._adamw, _SKIPPED, self._is_skipped)
        self._in_units = [(self.weights[name], unit) for name, unit in (units or {}).items()]
        self.average: dict[str, Tensor] | None = None
        if settings.ema:
            self.average = {name: one.detach().clone() for name, one in self.weights.items()}

    @property
    def shown(self) -> dict[str, Tensor]:
        """The weights that are measured and saved: the average where one is kept."""
        if self.average is not None:
            return self.average
        return {name: one.detach() for name, one in self.weights.items()}

    @property
    def skips_bad_steps(self) -> bool:
        """Whether gradients that are no numbers leave the weights as they were."""
        return self._is_fused and not isinstance(self._list[0], DTensor)

    def clip(self) -> Tensor:
        """Shorten the gradients to the largest norm; returns the norm they had, on the device.

        It is valid until the next one.
        """
        if self._graphs is None:
            return self._clip()
        return self._graphs.run("clip", self._clip)[0]

    def _clip(self) -> Tensor:
        for weight, unit in self._in_units:
            if weight.grad is not None:
                own_part(weight.grad).mul_(unit)
        limit = self._settings.clip or math.inf
        norm = whole(nn.utils.clip_grad_norm_(self._list, limit))
        if self.skips_bad_steps:
            self._is_skipped.copy_(~norm.isfinite())
        return norm

    def step(self, number: int) -> None:
        """Use up the gradients at a step counted from 0."""
        rate = learning_rate(self._settings, number, self._num_steps)
        if self._graphs is None:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._move(rate)
            for used in self._list:
                used.grad = None
        else:
            self._rate.fill_(rate)
            self._graphs.run("step", self._move_and_clear)
        if self.average is not None:
            self._average(number)

    @torch.no_grad()
    def _move(self, rate: float | Tensor) -> None:
        for weight, unit in self._in_units:
            own_part(weight).div_(unit)
        self._adamw.step()
        over_rate = self._settings.muon_rate / self._settings.learning_rate
        self._muon.step(rate * over_rate, self._is_skipped if self.skips_bad_steps else None)
        for weight, unit in self._in_units:
            own_part(weight).mul_(unit)

    def _move_and_clear(self) -> None:
        self._move(self._rate)
        torch._foreach_zero_([one.grad for one in self._list if one.grad is not None])

    @torch.no_grad()
    def _average(self, number: int) -> None:
        assert self.average is not None
        averages = list(self.average.values())
        weight = 1 - average_decay(self._settings.ema, number)
        if not self.skips_bad_steps:
            torch._foreach_lerp_(averages, self._list, weight)
            return
        # A step that did nothing to the weights does nothing to their average either.
        used = weight * (1 - self._is_skipped)
        for average, one in zip(averages, self._list, strict=True):
            average.lerp_(one, used)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """What is remembered of earlier gradients, by the weight's name; zeros before any."""
        return {
            name: {MOMENTUM: self._momenta[name]}
            if name in self._momenta
            else {key: self._state(one)[key] for key in MOMENTS}
            for name, one in self.weights.items()
        }

    def set_steps(self, number: int) -> None:
        """Go on as if so many steps were taken; moments are filled in by the caller."""
        for name, one in self.weights.items():
            if name not in self._momenta:
                self._state(one)["step"].fill_(float(number))

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adamw.state[weight]
        if not state:
            # As AdamW itself begins: its counter lies beside the weights only when it is fused.
            device = weight.device if self._is_fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _with_and_without_decay(
    weights: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, object]]:
    """Matrices decay; the scales of norms do not, or they would be pulled to zero."""
    listed = list(weights)
    matrices = [one for _, one in listed if one.dim() >= 2]
    scales = [one for _, one in listed if one.dim() < 2]
    groups = [(matrices, weight_decay), (scales, 0.0)]
    return [{"params": ones, "weight_decay": decay} for ones, decay in groups if ones]
