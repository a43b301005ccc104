"""The loop: steps, what is read back of them, measurements, checkpoints.

A step's gradients are those of all its micro-batches, wherever they were computed: every loss is
divided by what the whole step has, so that parts just add up. Nothing in a step waits for a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.progress import Progress
from fledge.contracts.train_settings import TrainSettings
from fledge.features.host_batch import HostBatch
from fledge.models.head import Eagle3Head
from fledge.training.cadence import Cadence
from fledge.training.checkpoint import TrainState, prune_checkpoints, write_checkpoint
from fledge.training.distributed import Processes
from fledge.training.faults import explained_memory, samples_not_finite, stop_not_finite
from fledge.training.measuring import Measurer, Measures
from fledge.training.optimizer import Optimizer
from fledge.training.order import TrainingOrder
from fledge.training.passes import Passes
from fledge.training.readback import LateReader, StepFigures
from fledge.training.reporting import Reporter
from fledge.training.run_state import gather_state, restore_state, shown_weights
from fledge.training.sources import Prefetcher, Source
from fledge.training.step_sums import StepSums, add_sums, no_sums
from fledge.training.ttt import count_labels

Watch = Callable[[int, Measures], bool]
"""Called at each measurement with the step; True ends the run there."""


class Loaded(NamedTuple):
    """A micro-batch in the memory of the host, and how many labels each draft step has there."""

    host: HostBatch
    labels_K: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    passes: Passes

    optimizer: Optimizer
    source: Source
    order: TrainingOrder
    measurer: Measurer | None
    exhibit: Eagle3Head
    """On the CPU, for the weights that are saved."""


class Trainer:
    """One run in one process; all processes do the same."""

    def __init__(
        self,
        parts: Parts,
        settings: TrainSettings,
        out: Path,
        *,
        processes: Processes,
        progress: Progress,
        reporter: Reporter | None,
        watch: Watch | None = None,
    ) -> None:
        """`reporter` is None in all processes but the first."""
        self._parts, self._settings, self._out = parts, settings, out
        self._processes, self._progress, self._reporter = processes, progress, reporter
        self._watch = watch
        self._device = parts.source.device
        self._longest = int(parts.source.samples.lengths.max())
        self._reader = LateReader(settings.loss.steps, self._device)
        self._recent: dict[int, list[Loaded]] = {}
        self._step = self._tokens = self._saved_step = 0
        self._is_over = False
        self._measures: dict[int, dict[str, Any]] = {}

    @property
    def num_steps(self) -> int:
        return self._parts.order.num_steps

    def restore(self, state: TrainState) -> None:
        """Go on from a state."""
        restore_state(self._parts.optimizer, state)
        self._step = self._saved_step = state.step
        self._tokens = state.tokens
        self._is_over = state.is_over

    def run(self) -> None:
        """All steps that are left."""
        if self._is_over:
            return
        order, first = self._parts.order, self._step
        left = sum(order.tokens(step) for step in range(first, self.num_steps))
        ahead = 2 + math.ceil(len(order.micro_batches(0)) / self._processes.count)
        with ExitStack() as stack:
            coming = stack.enter_context(Prefetcher(self._load, self._plans(first), ahead=ahead))
            task = stack.enter_context(self._progress.task("training", left, "tokens"))
            if self._reporter is not None:
                self._reporter.begin(task, coming)
            for step in range(first, self.num_steps):
                with self._explained(f"at step {step + 1}"):
                    self._take_step(step, coming)
                    task.advance(order.tokens(step))
                if self._pause():
                    break

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return explained_memory(self._settings, self._device, what, longest=self._longest)

    def _plans(self, first: int) -> Iterator[tuple[int, ...]]:
        """This process's micro-batches from a step on."""
        for step in range(first, self.num_steps):
            for micro_batch, _ in self._share(step):
                yield micro_batch

    def _share(self, step: int) -> list[tuple[tuple[int, ...], bool]]:
        """This process's micro-batches of a step, and whether each counts.

        Where they do not go round, some processes repeat the first one without weight: gradients
        are summed by all of them together.
        """
        micro_batches = self._parts.order.micro_batches(step)
        counted = [(one, True) for one in micro_batches]
        missing = -len(counted) % self._processes.count
        return self._processes.share([*counted, *[(micro_batches[0], False)] * missing])

    def _load(self, positions: Sequence[int]) -> Loaded:
        host = self._parts.source.load(positions)
        loss_mask = host.tensors["loss_mask"].bool().numpy()
        return Loaded(host, count_labels(loss_mask, host.lengths, self._settings.loss.steps))

    def _take_step(self, step: int, coming: Prefetcher[Loaded]) -> None:
        parts, processes = self._parts, self._processes
        flags = [is_counted for _, is_counted in self._share(step)]
        loaded = [next(coming) for _ in flags]
        denominators_K = self._denominators(step, loaded, flags)
        weightless_K = torch.full_like(denominators_K, math.inf)
        losses, sums = [], [no_sums(self._settings.loss.steps, self._device)]
        for place, (one, is_counted) in enumerate(zip(loaded, flags, strict=True)):
            generator = self._generator(step, processes.rank + place * processes.count)
            result = parts.passes.learn(
                parts.source.put(one.host),
                denominators_K if is_counted else weightless_K,
                generator,
                is_last=place == len(flags) - 1,
            )
            losses.append(result.loss)
            if is_counted:
                sums.append(result.sums)
        self._recent[step + 1] = loaded
        self._close_step(step, torch.stack(losses).double(), add_sums(sums))

    def _close_step(self, step: int, losses: Tensor, sums: StepSums) -> None:
        """Clip, have a look at what is known by now, and move the weights."""
        optimizer = self._parts.optimizer
        norm = optimizer.clip().double().view(1)
        shared = self._processes.sum(torch.cat([losses.sum().view(1), sums.packed().flatten()]))
        self._reader.push(step + 1, torch.cat([norm, shared]), losses)
        for figures in self._reader.ready():
            self._report(figures)
        optimizer.step(step)
        self._step = step + 1
        self._tokens += self._parts.order.tokens(step)

    def _denominators(self, step: int, loaded: Sequence[Loaded], flags: Sequence[bool]) -> Tensor:
        """What the losses of each draft step are divided by, over all processes.

        As many as there are draft steps by now.
        """
        num_steps = self._settings.loss.steps_at(step / self.num_steps)
        if self._settings.loss.mean == "positions":
            tokens = float(self._parts.order.tokens(step))
            return torch.full((num_steps,), tokens, device=self._device)
        counts = np.zeros(num_steps, np.int64)
        for one, is_counted in zip(loaded, flags, strict=True):
            counts += one.labels_K[:num_steps] * is_counted
        counts_K = torch.from_numpy(counts.astype(np.float32))
        return self._processes.sum(counts_K.to(self._device, non_blocking=True))

    def _generator(self, step: int, micro_batch: int) -> torch.Generator | None:
        """Noise is a function of the seed, the step and the micro-batch's number in it."""
        if not self._settings.hidden_noise:
            return None
        named = f"{self._settings.seed}/{step}/{micro_batch}".encode()
        return torch.Generator(self._device).manual_seed(xxhash.xxh3_64_intdigest(named) >> 1)

    def _report(self, figures: StepFigures, *, is_timed: bool = True) -> None:
        loaded = self._recent.pop(figures.step)
        if not (math.isfinite(figures.loss) and math.isfinite(figures.norm)):
            self._stop(figures, loaded)
        if self._reporter is not None:
            self._reporter.add_step(figures, is_timed=is_timed)

    def _stop(self, figures: StepFigures, loaded: Sequence[Loaded]) -> None:
        """Say where it went wrong; all processes come here together."""
        bad: list[list[int]] = []
        for loss, one in zip(figures.micro_losses, loaded, strict=True):
            if not math.isfinite(loss):
                batch = self._parts.source.put(one.host)
                bad.append(samples_not_finite(batch) or list(one.host.sample_numbers))
        found = [batch for own in self._processes.gather(bad) for batch in own]
        is_ahead = self._step >= figures.step
        if is_ahead and self._parts.optimizer.skips_bad_steps:
            self._rewind(figures.step - 1)
            is_ahead = False
        if not is_ahead and self._step > self._saved_step:
            self._save()
        kept = "There is no checkpoint yet."
        if self._saved_step:
            kept = f"The state after step {self._saved_step} is kept as the last checkpoint."
        stop_not_finite(
            figures.step, loss=figures.loss, norm=figures.norm, bad_batches=found, kept=kept
        )

    def _rewind(self, step: int) -> None:
        """A GPU was ahead of what was known of it; its bad steps left the weights as they were."""
        while self._step > step:
            self._step -= 1
            self._tokens -= self._parts.order.tokens(self._step)

    def _pause(self) -> bool:
        """Measure and save where it is time; True where the run is to end."""
        step, cadence = self._step, Cadence(self._settings, self.num_steps)
        is_measured, is_saved = cadence.is_measured(step), cadence.is_saved(step)
        if not (is_measured or is_saved):
            return False
        for figures in self._reader.all():
            # Read right behind the step before it, so the clock says nothing about it.
            self._report(figures, is_timed=False)
        if is_measured and self._parts.measurer is not None:
            with self._explained(f"measuring at step {step}"):
                self._is_over = self._measure(self._parts.measurer)
        if is_saved or self._is_over:
            self._save()
        if self._reporter is not None:
            self._reporter.resume()
        return self._is_over

    def _measure(self, measurer: Measurer) -> bool:
        measures = measurer.measure(shown_weights(self._parts.optimizer))
        self._measures = {self._step: measures.as_record()}
        is_over = False
        if self._reporter is not None:
            self._reporter.add_measures(self._step, self.num_steps, measures)
            is_over = self._watch is not None and self._watch(self._step, measures)
        return self._processes.gather(is_over)[0]

    def _save(self) -> None:
        state = gather_state(
            self._parts.optimizer,
            step=self._step,
            tokens=self._tokens,
            measures=self._measures.get(self._step, {}),
            is_over=self._is_over,
        )
        if self._processes.is_first:
            self._parts.exhibit.load_state_dict(dict(state.average or state.weights))
            write_checkpoint(self._out, self._parts.exhibit, state)
            prune_checkpoints(self._out, self._settings.keep_checkpoints, step=self._step)
            if self._reporter is not None:
                self._reporter.draw()
        self._saved_step = self._step
        self._processes.wait()
