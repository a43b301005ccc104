"""Where micro-batches come from: samples joined in threads, put onto the device when wanted.

    positions -> load (threads: read, check, join) -> HostBatch -> put (device) -> MicroBatch

Samples are counted by their position in the source, in the order of the corpus: the same online and
from features, as long as both are of one corpus.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError
from fledge.features.host_batch import HostBatch
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch

T = TypeVar("T")

_NUM_THREADS = 4


class Said(NamedTuple):
    """What a sample says, as prompts are cut out of it."""

    token_ids: NDArray[Any]
    loss_mask: NDArray[np.bool_]


class SampleTable(NamedTuple):
    """What is known of samples before any is read, in the order of the corpus."""

    numbers: NDArray[np.int64]
    """Of each position in the corpus."""

    lengths: NDArray[np.int64]
    """Tokens of each position, up to its last label."""

    row_hashes: NDArray[np.uint64]
    """Of the conversation that each position belongs to."""

    source_names: NDArray[np.str_] | None = None
    """Where each position is from; None where that is not known."""


class Source(Protocol):
    """Samples to train on."""

    @property
    def device(self) -> torch.device: ...

    @property
    def samples(self) -> SampleTable: ...

    def said(self, position: int) -> Said:
        """Tokens of one position."""

    def load(self, positions: Sequence[int]) -> HostBatch:
        """Read and join samples; called in threads."""

    def put(self, host: HostBatch) -> MicroBatch:
        """Move a loaded micro-batch to the device, without waiting for it."""


class Waited(Protocol):
    """Something that was waited for."""

    waited_s: float


class Prefetcher(Generic[T]):
    """Loads micro-batches ahead of their use, in order; counts the time it was waited for."""

    def __init__(
        self, load: Callable[[Sequence[int]], T], plans: Iterable[Sequence[int]], *, ahead: int
    ) -> None:
        """`ahead` micro-batches are read before they are asked for."""
        self.waited_s = 0.0
        self._load = load
        self._plans = iter(plans)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fledge-load")
        self._coming: deque[Future[T]] = deque()
        for _ in range(ahead):
            self._ask()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        self._ask()
        if not self._coming:
            raise StopIteration
        started = time.perf_counter()
        loaded = self._coming.popleft().result()
        self.waited_s += time.perf_counter() - started
        return loaded

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        plan = next(self._plans, None)
        if plan is not None:
            self._coming.append(self._pool.submit(self._load, plan))


def iterate(source: Source, plans: Iterable[Sequence[int]]) -> Iterator[MicroBatch]:
    """Micro-batches of these samples, one after the other."""
    with Prefetcher(source.load, plans, ahead=2) as coming:
        for host in coming:
            yield source.put(host)


def refuse_long_samples(samples: SampleTable, micro_tokens: int) -> None:
    """A sample is read whole; a micro-batch has to hold the longest."""
    longest = int(samples.lengths.argmax())
    if samples.lengths[longest] > micro_tokens:
        raise ConfigError(
            f"train.micro_tokens is {micro_tokens}, and sample {samples.numbers[longest]} of the "
            f"corpus has {samples.lengths[longest]} tokens; use at least as many, or tokenize with "
            f"tokenize.max_tokens = {micro_tokens}."
        )


def padded(batch: MicroBatch, num_tokens: int | None) -> MicroBatch:
    """The same samples with padding behind them; compiled code likes all batches of one size."""
    missing = (num_tokens or 0) - batch.documents.num_tokens
    if missing <= 0:
        return batch
    device = batch.documents.device
    return replace(
        batch,
        token_ids_T=F.pad(batch.token_ids_T, (0, missing)),
        loss_mask_T=F.pad(batch.loss_mask_T, (0, missing)),
        documents=make_documents(batch.documents.lengths, device, padded_to=num_tokens),
        features_TF=F.pad(batch.features_TF, (0, 0, 0, missing)),
    )
