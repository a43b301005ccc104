"""Which samples the target reads together, and which of them share a file.

Samples stay in the order of the corpus. A pass takes whole samples while they fit; a shard takes
whole passes until it is full. So nothing is padded, no pass is half empty at the end of a shard,
and a run that goes on after a kill makes the same shards of the same passes.
"""

from dataclasses import dataclass

from fledge.features.label_rows import read_tokens
from fledge.features.sample_rows import SampleRows
from fledge.store.feature_layout import FeatureLayout

SHARD_BYTES = 512 << 20
"""Where a shard ends at the latest: its samples are in memory until it is written."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file to be made."""

    number: int
    passes: tuple[tuple[int, ...], ...]
    """Samples of the corpus that are read together."""

    read_tokens: int
    """Tokens that the target reads for it."""

    @property
    def num_samples(self) -> int:
        return sum(len(numbers) for numbers in self.passes)


def order_shards(
    rows: SampleRows, layout: FeatureLayout, *, pass_tokens: int, shard_tokens: int
) -> tuple[ShardPlan, ...]:
    """All shards of a corpus."""
    token, feature, label = (
        layout.bytes_per("tokens"),
        layout.bytes_per("features"),
        layout.bytes_per("labels"),
    )
    shards: list[ShardPlan] = []
    passes: list[tuple[int, ...]] = []
    tokens = size = read = 0
    for numbers in order_passes(rows, pass_tokens):
        passes.append(numbers)
        for number in numbers:
            kept, labels = int(rows.kept[number]), int(rows.labels[number])
            tokens += kept
            read += read_tokens(kept)
            size += kept * token + (kept - 2) * feature + labels * label
        if tokens >= shard_tokens or size >= SHARD_BYTES:
            shards.append(ShardPlan(len(shards), tuple(passes), read))
            passes, tokens, size, read = [], 0, 0, 0
    if passes:
        shards.append(ShardPlan(len(shards), tuple(passes), read))
    return tuple(shards)


def order_passes(rows: SampleRows, pass_tokens: int) -> list[tuple[int, ...]]:
    """Samples that are read together; one that is longer than a pass is read alone."""
    passes: list[tuple[int, ...]] = []
    numbers: list[int] = []
    filled = 0
    for number in rows.used.tolist():
        length = read_tokens(int(rows.kept[number]))
        if numbers and filled + length > pass_tokens:
            passes.append(tuple(numbers))
            numbers, filled = [], 0
        numbers.append(number)
        filled += length
    if numbers:
        passes.append(tuple(numbers))
    return passes
