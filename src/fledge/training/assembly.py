"""From what was asked for to the parts of a run: target, source, head, optimizer, measurements."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.train_settings import TrainSettings
from fledge.engine.graphs import Graphs
from fledge.features.feature_store import FeatureStore
from fledge.models.checked_target import load_checked_target
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.placement import pick_dtype
from fledge.models.target import Target
from fledge.models.target_reading import Readout
from fledge.models.turned_rows import TurnedRows
from fledge.training.distributed import Processes, wrap
from fledge.training.feature_sizes import measure_sizes
from fledge.training.head_init import make_head
from fledge.training.measuring import Measurer, make_decoder, pack_held_out
from fledge.training.offline import OfflineSource, TemperedShare
from fledge.training.online import OnlineSource
from fledge.training.optimizer import Optimizer
from fledge.training.order import Division, TrainingOrder, divide, from_sources, some_of
from fledge.training.passes import CapturedPasses, LaunchedPasses, Passes, can_be_captured
from fledge.training.sources import Source
from fledge.training.train_input import Drafted, TrainInput
from fledge.training.trainer import Parts
from fledge.training.ttt import TTTModule


def make_order(given: TrainInput, settings: TrainSettings) -> tuple[Division, TrainingOrder]:
    """Which samples are learned from, in which order, and which are held out."""
    division = divide(given.samples.row_hashes, settings.held_out.share)
    named = from_sources(division.trained, given.samples.source_names, settings.sources)
    trained = some_of(named, given.samples.row_hashes, settings.share)
    order = TrainingOrder(
        trained,
        given.samples.lengths[trained],
        seed=settings.seed,
        epochs=settings.epochs,
        micro_tokens=settings.micro_tokens,
        batch_tokens=settings.batch_tokens,
        max_steps=settings.max_steps,
    )
    return Division(trained, division.held_out), order


def load_target(given: TrainInput, settings: TrainSettings, progress: Progress) -> Target:
    return load_checked_target(
        given.target,
        given.directory,
        origin=given.origin,
        dtype=pick_dtype(settings.dtype, given.device),
        device=given.device,
        progress=progress,
    )


def assemble(
    given: TrainInput,
    settings: TrainSettings,
    target: Target,
    processes: Processes,
    progress: Progress | None = None,
    *,
    is_captured: bool | None = None,
) -> Parts:
    """Everything a trainer needs, on this process's device.

    Of the target only its matrices are kept, unless it has to read or to decode. `is_captured` has
    steps captured and replayed; None does so where one process trains and it is possible.
    """
    division, order = make_order(given, settings)
    readout, embedding_VD = target.readout, target.embedding.weight.detach()
    config = given.head_config(settings)
    drafted = given.choose_drafted(division.trained, settings, progress or SilentProgress())
    taught_ids = drafted.ids if drafted.taught is None else drafted.ids[drafted.taught]
    head = make_head(
        replace(config, draft_vocab_size=len(taught_ids)),
        taught_ids,
        seed=settings.seed,
        readout=readout if settings.head.lm_head_from_target else None,
    )
    if given.start is not None:
        given.start.give_to(head)
    exhibit = _exhibit(config, drafted)
    source = _source(given, settings, target, head.draft_to_target_V)
    if settings.keep_readings and isinstance(source, OnlineSource):
        used = np.union1d(division.trained, division.held_out)
        source.keep_readings(
            used, settings.micro_tokens, progress or SilentProgress(), settings.kept_format
        )
    units = _units(head.to(given.device), source, division.trained, settings, processes)
    if units and given.start is None:
        with torch.no_grad():
            head.fc.weight.mul_(units["head.fc.weight"])
    inner = _module(head, embedding_VD, readout, settings)
    graphs = None
    if processes.count == 1 and (can_be_captured(inner) if is_captured is None else is_captured):
        graphs = Graphs(given.device)
    passes = _passes(inner, graphs, given, settings, processes)
    optimizer = Optimizer(inner, settings.optimizer, order.num_steps, units=units, graphs=graphs)
    is_copied = optimizer.average is not None or (
        processes.count > 1 and settings.parallel == "fsdp"
    )

    def copied() -> TTTModule:
        twin = Eagle3Head(head.config, head.draft_to_target_V).to(given.device)
        if isinstance(twin.lm_head, TurnedRows) and isinstance(head.lm_head, TurnedRows):
            twin.lm_head.rows_VD = head.lm_head.rows_VD
        return _module(twin, embedding_VD, readout, settings)

    measurer = None
    if len(division.held_out):
        held_out = np.asarray(division.held_out)
        measurer = Measurer(
            inner,
            source,
            processes.share(pack_held_out(source, held_out, settings)),
            make_decoder(target, exhibit, source, held_out, settings, processes),
            copied=copied if is_copied else None,
            settings=settings,
            processes=processes,
        )
    return Parts(passes, optimizer, source, order, measurer, exhibit)


def _exhibit(config: HeadConfig, drafted: Drafted) -> Eagle3Head:
    """The head as it is shown and saved.

    Turned rows have no weights, so what learned some of the tokens drafts all of them.
    """
    head = Eagle3Head(config, torch.from_numpy(drafted.ids).long())
    if drafted.common is not None:
        head.common_V = torch.from_numpy(drafted.common)
    return head


def _passes(
    module: TTTModule,
    graphs: Graphs | None,
    given: TrainInput,
    settings: TrainSettings,
    processes: Processes,
) -> Passes:
    """Captured ones draw no noise."""
    if graphs is None or settings.hidden_noise:
        return LaunchedPasses(wrap(module, processes, settings.parallel), processes)
    return CapturedPasses(module, graphs, longest=int(given.samples.lengths.max()))


def _units(
    head: Eagle3Head,
    source: Source,
    positions: NDArray[np.int64],
    settings: TrainSettings,
    processes: Processes,
) -> dict[str, Tensor]:
    """What weights are learned in; all processes have the units of the first."""
    if not settings.optimizer.balanced_taps:
        return {}
    sizes_F = measure_sizes(head, source, positions).cpu()
    return {"head.fc.weight": 1 / processes.gather(sizes_F)[0].to(head.fc.weight.device)}


def _source(
    given: TrainInput, settings: TrainSettings, target: Target, draft_ids_V: Tensor
) -> Source:
    device, temperature = given.device, settings.loss.target_temperature
    padded_to = settings.micro_tokens if device.type == "cuda" else None
    if isinstance(given.inside, FeatureStore):
        tempered = None
        if temperature != 1:
            tempered = TemperedShare(target.readout, draft_ids_V.to(device), temperature)
        return OfflineSource(
            given.inside,
            device=device,
            dtype=_compute_dtype(settings, device),
            padded_to=padded_to,
            tempered=tempered,
        )
    return OnlineSource(
        given.inside,
        given.samples,
        target,
        given.taps,
        draft_ids_V,
        temperature=temperature,
        padded_to=padded_to,
    )


def _module(
    head: Eagle3Head, embedding_VD: Tensor, readout: Readout, settings: TrainSettings
) -> TTTModule:
    return TTTModule(
        head,
        embedding_VD,
        readout,
        settings.loss,
        compute_dtype=_compute_dtype(settings, embedding_VD.device),
        hidden_noise=settings.hidden_noise,
    )


def _compute_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """What products are computed in; float16 would need its losses scaled."""
    dtype = pick_dtype(settings.dtype, device)
    return torch.float32 if dtype is torch.float16 else dtype
