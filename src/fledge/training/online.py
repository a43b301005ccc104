"""Training beside a live target: it reads each micro-batch, and nothing is kept on disk."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fledge.features.host_batch import HostBatch
from fledge.features.label_rows import label_rows
from fledge.features.sample_rows import count_rows
from fledge.features.target_rows import describe_rows
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch
from fledge.store.corpus import Corpus
from fledge.store.row_hash import conversation_hash
from fledge.training.sources import Said, SampleTable, padded


class OnlineSource:
    """Samples of a corpus, with what the target makes of them."""

    def __init__(
        self,
        corpus: Corpus,
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
        reading = self._target.read(tensors["token_ids"], documents, self._taps)
        batch = MicroBatch(
            token_ids_T=tensors["token_ids"],
            loss_mask_T=tensors["loss_mask"],
            documents=documents,
            features_TF=reading.features_TF,
            targets=describe_rows(
                reading.final_TD,
                tensors["rows"],
                self._target.readout,
                self._draft_ids_V,
                temperature=self._temperature,
            ),
            sample_numbers=host.sample_numbers,
            first_labels=host.first_labels,
        )
        return padded(batch, self._padded_to)


def list_corpus(corpus: Corpus) -> SampleTable:
    """The samples of a corpus that teach something."""
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
