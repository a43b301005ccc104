"""Training beside a live target: it reads each micro-batch, and nothing is kept on disk.

Or it reads each sample once, and what it said stays in the device's memory.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.progress import Progress
from fledge.features.channel_spread import MAX_ROWS, channels_of
from fledge.features.host_batch import HostBatch
from fledge.features.label_rows import label_rows
from fledge.features.sample_rows import count_rows
from fledge.features.target_rows import describe_rows
from fledge.models.target import Target
from fledge.ops.documents import Documents, make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.store.channels import Channels
from fledge.store.corpus import Samples
from fledge.store.row_hash import conversation_hash
from fledge.training.kept_readings import KeptReadings, KeptShape, KeptSizes, consecutive
from fledge.training.sources import Said, SampleTable, iterate, padded


class OnlineSource:
    """Samples of a corpus, with what the target makes of them."""

    def __init__(
        self,
        corpus: Samples,
        samples: SampleTable,
        target: Target,
        taps: Sequence[int],
        draft_ids_V: Tensor,
        *,
        temperature: float = 1.0,
        padded_to: int | None = None,
    ) -> None:
        """`samples` are those of `list_corpus`; batches are filled up to `padded_to` tokens.

        The draft vocabulary's share is that at the temperature.
        """
        self._padded_to, self._temperature = padded_to, temperature
        self.samples = samples
        self._corpus, self._target, self._taps = corpus, target, tuple(taps)
        self._draft_ids_V = draft_ids_V.to(target.device)
        self._kept: KeptReadings | None = None

    @property
    def device(self) -> torch.device:
        return self._target.device

    def said(self, position: int) -> Said:
        sample = self._corpus[int(self.samples.numbers[position])]
        length = int(self.samples.lengths[position])
        return Said(sample.token_ids[:length], sample.loss_mask[:length])

    def load(self, positions: Sequence[int]) -> HostBatch:
        samples = [self.said(position) for position in positions]
        lengths = tuple(len(sample.token_ids) for sample in samples)
        starts = np.cumsum((0, *lengths[:-1]))
        own_rows = [label_rows(sample.loss_mask) for sample in samples]
        rows = [start + own for start, own in zip(starts, own_rows, strict=True)]
        arrays = {
            "token_ids": np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
            "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
            "rows": np.concatenate(rows),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        numbers = tuple(int(self.samples.numbers[position]) for position in positions)
        return HostBatch(lengths, numbers, tensors, tuple(int(own[0]) for own in own_rows))

    @torch.no_grad()
    def put(self, host: HostBatch) -> MicroBatch:
        tensors = {
            name: tensor.to(self.device, non_blocking=True) for name, tensor in host.tensors.items()
        }
        documents = make_documents(host.lengths, self.device)
        if self._kept is not None:
            features_TF, targets = self._kept.find(host.sample_numbers, tensors["rows"])
        else:
            features_TF, targets = self._read(tensors, documents)
        batch = MicroBatch(
            token_ids_T=tensors["token_ids"],
            loss_mask_T=tensors["loss_mask"],
            documents=documents,
            features_TF=features_TF,
            targets=targets,
            sample_numbers=host.sample_numbers,
            first_labels=host.first_labels,
        )
        return padded(batch, self._padded_to)

    def _read(
        self, tensors: Mapping[str, Tensor], documents: Documents
    ) -> tuple[Tensor, TargetRows]:
        reading = self._target.read(tensors["token_ids"], documents, self._taps)
        targets = describe_rows(
            reading.final_TD,
            tensors["rows"],
            self._target.readout,
            self._draft_ids_V,
            temperature=self._temperature,
        )
        return reading.features_TF, targets

    def keep_readings(
        self,
        positions: NDArray[np.int64],
        micro_tokens: int,
        progress: Progress,
        kept_format: FeatureFormat = "exact",
    ) -> None:
        """Have the target read these samples now; from here on no others may be asked for.

        `positions` are ascending.
        """
        sizes = kept_sizes(self._corpus, self.samples, positions)
        padded_to, self._padded_to = self._padded_to, None
        kept = KeptReadings(
            sizes,
            KeptShape(
                num_taps=len(self._taps),
                hidden_size=self._target.readout.weight_VD.shape[1],
                format=kept_format,
            ),
            dtype=self._target.dtype,
            device=self.device,
            channels=None if kept_format == "exact" else self._channels(positions, micro_tokens),
        )
        plans = (positions[list(one)].tolist() for one in consecutive(sizes.lengths, micro_tokens))
        with progress.task("reading the corpus", int(sizes.lengths.sum()), "tokens") as task:
            for batch in iterate(self, plans):
                kept.add(batch.sample_numbers, batch.features_TF, batch.targets)
                task.advance(batch.documents.num_tokens)
        self._padded_to, self._kept = padded_to, kept

    def _channels(self, positions: NDArray[np.int64], micro_tokens: int) -> Channels:
        """Where channels lie in samples from all over the corpus."""
        lengths = self.samples.lengths[positions]
        limit = min(MAX_ROWS, micro_tokens)
        wanted = min(len(positions), max(1, int(limit / lengths.mean())))
        places = np.linspace(0, len(positions) - 1, wanted).round().astype(np.int64)
        # At least one sample, and no more than a micro-batch holds.
        count = max(1, int(np.searchsorted(np.cumsum(lengths[places]), limit, side="right")))
        (batch,) = iterate(self, [positions[places[:count]].tolist()])
        return channels_of(batch.features_TF)


def kept_sizes(corpus: Samples, samples: SampleTable, positions: NDArray[np.int64]) -> KeptSizes:
    numbers = samples.numbers[positions]
    return KeptSizes(numbers, samples.lengths[positions], count_rows(corpus).labels[numbers])


def list_corpus(corpus: Samples) -> SampleTable:
    """The samples of a corpus, or of several, that teach something."""
    kept = count_rows(corpus).kept
    numbers = np.flatnonzero(kept)
    # As features hold it too: both ways hold out the same conversations.
    ids = (row_id for shard in corpus.shards for row_id in shard.row_ids())
    hashes = [conversation_hash(row_id.decode()) for row_id in ids]
    names = [np.array(shard.note.sources)[shard.source_ids] for shard in corpus.shards]
    return SampleTable(
        numbers,
        kept[numbers],
        np.array(hashes, np.uint64)[numbers],
        np.concatenate(names)[numbers],
    )
