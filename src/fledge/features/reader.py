"""Features as decoded batches, for any trainer.

    for batch in FeatureReader("features", batch_tokens=8192, seed=7, epoch=0, device="cuda"):
        batch.token_ids_T, batch.features_TF, batch.targets.final_RD

The order is a function of the seed and the epoch. Threads read ahead as far as `max_bytes` allows;
every sample is checked against its checksum.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError
from fledge.features.feature_store import FeatureStore
from fledge.features.host_batch import BatchDecoder, HostBatch, host_bytes, load_batch
from fledge.features.read_ahead import read_ahead
from fledge.ops.micro_batch import MicroBatch
from fledge.store.shuffle import shuffled

DEFAULT_MAX_BYTES = 1 << 30


class FeatureReader:
    """One epoch of batches; may be iterated again, with the same result."""

    def __init__(
        self,
        features: str | Path | FeatureStore,
        *,
        batch_tokens: int,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        max_bytes: int = DEFAULT_MAX_BYTES,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`prefetch` threads hold at most `max_bytes` that were not handed out yet.

        Of `world_size` processes, each gets as many batches as the others, none twice.
        """
        check_range("prefetch", prefetch, 1)
        check_range("world_size", world_size, 1)
        check_range("rank", rank, 0, world_size - 1)
        self.store = features if isinstance(features, FeatureStore) else FeatureStore.open(features)
        self.device, self.dtype = torch.device(device), dtype
        self._prefetch, self._max_bytes = prefetch, max_bytes
        count = len(self.store)
        order = shuffled(count, seed, epoch).tolist() if shuffle else list(range(count))
        batches = _fill(order, self.store, batch_tokens)
        whole_rounds = len(batches) // world_size
        self.places = [batches[i * world_size + rank] for i in range(whole_rounds)]
        """Of the samples of each batch, in the store."""

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[MicroBatch]:
        return read_batches(
            self.store,
            self.places,
            device=self.device,
            dtype=self.dtype,
            threads=self._prefetch,
            max_bytes=self._max_bytes,
        )


def read_batches(
    store: FeatureStore,
    places: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    threads: int = 2,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[MicroBatch]:
    """Batches of chosen samples, given by their places in the store."""
    decoder = BatchDecoder(store, device, dtype)
    is_pinned = device.type == "cuda"
    costs = [host_bytes(store, batch) for batch in places]
    loaded = read_ahead(
        lambda batch: load_batch(store, batch, is_pinned=is_pinned),
        places,
        costs,
        threads=threads,
        max_bytes=max_bytes,
    )
    return _decoded(decoder, loaded)


def _decoded(
    decoder: BatchDecoder, loaded: Generator[HostBatch, None, None]
) -> Iterator[MicroBatch]:
    # Closed at once when a loop is left early, so that its threads end.
    with closing(loaded):
        for host in loaded:
            yield decoder.decode(host)


def _fill(order: Sequence[int], store: FeatureStore, batch_tokens: int) -> list[list[int]]:
    """Samples in the given order, as many to a batch as fit."""
    batches: list[list[int]] = []
    room = 0
    for place, length in zip(order, store.lengths[order].tolist(), strict=True):
        if length > batch_tokens:
            raise ConfigError(
                f"batch_tokens is {batch_tokens}, and sample {store.numbers[place]} of "
                f"{store.place} has {length} tokens; use at least {store.lengths.max()}."
            )
        if length > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(place)
        room -= length
    return batches
