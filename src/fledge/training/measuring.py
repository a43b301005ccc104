"""What is measured on held-out samples on the way: curves by depth, and real decoding.

The weights that are measured are those that will be saved. Where they are not the ones that learn
(an average, or parts on several processes), they are copied into a head of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import TrainSettings
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.training.decoding import DecodeSums, HeldOutDecoder, choose_prompts, unpacked_decode
from fledge.training.distributed import Processes
from fledge.training.held_out import measure_held_out
from fledge.training.metrics import DepthFigures, measure_sums
from fledge.training.order import choose, pack_in_order
from fledge.training.sources import Source, iterate
from fledge.training.step_sums import unpacked
from fledge.training.ttt import TTTModule

_SAMPLES_PER_PROMPT = 4
"""Samples that are looked at for each prompt: some begin with the target's own words."""


@dataclass(frozen=True, slots=True)
class Measures:
    """One measurement over all processes."""

    depth: DepthFigures
    decode: DecodeSums | None

    @property
    def accept_length(self) -> float | None:
        return None if self.decode is None else self.decode.accept_length

    def as_record(self) -> dict[str, Any]:
        """As a checkpoint states it."""
        return {
            "accept_length": self.accept_length,
            "ideal_speed_up": self.depth.ideal_speed_up,
            "loss": self.depth.loss,
        }

    def line(self) -> str:
        """For people."""
        parts = []
        if self.depth.loss is not None:
            parts.append(f"loss {self.depth.loss:.3f}")
        if self.depth.ideal_speed_up is not None:
            parts.append(f"ideal speed-up {self.depth.ideal_speed_up:.2f}")
        if self.accept_length is not None:
            parts.append(f"accept length {self.accept_length:.2f}")
        return ", ".join(parts)


class Measurer:
    """Measures the same held-out samples and prompts each time."""

    def __init__(
        self,
        module: TTTModule,
        source: Source,
        held_out: Sequence[Sequence[int]],
        decoder: HeldOutDecoder | None,
        *,
        copied: Callable[[], TTTModule] | None,
        settings: TrainSettings,
        processes: Processes,
    ) -> None:
        """`held_out` are this process's micro-batches; `copied` makes a module to copy into."""
        self._module, self._source, self._held_out = module, source, held_out
        self._decoder, self._processes = decoder, processes
        self._copied, self._settings = copied, settings
        self._copy: TTTModule | None = None

    @property
    def has_prompts(self) -> bool:
        """Of this process; the first has some where any has."""
        return self._decoder is not None

    def measure(self, shown: Mapping[str, Tensor]) -> Measures:
        """`shown` are the whole weights of the head, by their names there."""
        loss = self._settings.loss
        module = self._module
        if self._copied is not None:
            self._copy = self._copy or self._copied()
            self._copy.head.load_state_dict(dict(shown))
            module = self._copy
        batches = iterate(self._source, self._held_out)
        sums = measure_held_out(module, batches, num_steps=loss.steps).packed()
        total = self._processes.sum(sums.to(self._source.device))
        depth = measure_sums(unpacked(total), step_decay=loss.step_decay)
        return Measures(depth, self._decode(shown))

    def _decode(self, shown: Mapping[str, Tensor]) -> DecodeSums | None:
        if self._settings.held_out.decode_prompts == 0:
            return None
        depth = decode_depth(self._settings)
        packed = torch.zeros(2 + 2 * depth, dtype=torch.float64)
        if self._decoder is not None:
            packed = self._decoder.measure(shown).packed()
        total = self._processes.sum(packed.to(self._source.device))
        return unpacked_decode(total) if float(total[1]) else None


def decode_depth(settings: TrainSettings) -> int:
    return settings.held_out.decode_depth or settings.loss.steps


def pack_held_out(
    source: Source, held_out: NDArray[np.int64], settings: TrainSettings
) -> list[list[int]]:
    """Micro-batches of the held-out samples that are measured."""
    chosen = choose(held_out, settings.held_out.max_samples, seed=settings.seed)
    packed = pack_in_order(source.samples.lengths[chosen], settings.micro_tokens)
    return [[int(position) for position in chosen[members]] for members in packed]


def make_decoder(
    target: Target,
    head: Eagle3Head,
    source: Source,
    held_out: NDArray[np.int64],
    settings: TrainSettings,
    processes: Processes,
) -> HeldOutDecoder | None:
    """The engine with this process's share of the prompts; None where it has none."""
    wanted = settings.held_out
    if not wanted.decode_prompts:
        return None
    positions = choose(
        held_out, _SAMPLES_PER_PROMPT * wanted.decode_prompts, seed=settings.seed + 1
    )
    depth = decode_depth(settings)
    room = target.context_len - wanted.decode_tokens - depth - 1
    if room < 1:
        raise ConfigError(
            f"train.held_out.decode_tokens is {wanted.decode_tokens}, and with drafts of "
            f"{depth} tokens that leaves no room for a prompt in the target's context of "
            f"{target.context_len}; lower it, or set train.held_out.decode_prompts to 0."
        )
    prompts = choose_prompts(
        (source.said(int(position)) for position in positions),
        count=wanted.decode_prompts,
        max_prompt_len=room,
        seed=settings.seed,
    )
    own = processes.share(prompts)
    if not own:
        return None
    return HeldOutDecoder(
        target,
        head.config,
        head.draft_to_target_V,
        own,
        depth=depth,
        max_tokens=wanted.decode_tokens,
    )
