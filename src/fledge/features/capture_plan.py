"""What a capture would write, need and take, before anything runs. Arithmetic only.

What the field stores for every token, bf16 taps and final hidden state, is the measure that the
formats are compared with: 8H bytes a token with three taps, whatever the target's depth and size.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fledge.contracts.capture_settings import CaptureSettings, FeatureFormat
from fledge.contracts.feature_formats import FORMATS, row_bytes
from fledge.store.corpus_shard import token_dtype

OVERHEAD = 0.05
"""Room for headers, the index, and what a file system rounds up."""

_FIELD_ITEMSIZE = 2
_LOG_MASS_BYTES = 4
_TOP_LOGPROB_BYTES = 2
_CODEC_BYTES = 14
"""Of each value while it is being coded: three float32 numbers at a time, codes, what is packed."""

_LOGIT_BYTES = 10
_LOGITS_AT_ONCE = 1 << 27
_SHARDS_IN_MEMORY = 2
"""One that fills and one that is being written."""

_PASS_SHARE = 0.5
"""Of the measured speed of a matrix product that a whole forward pass reaches."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What a corpus amounts to, and what training needs of it."""

    num_samples: int
    num_unlabelled: int
    """Samples of them that teach nothing and are left out."""

    num_tokens: int
    kept_tokens: int
    """Up to each sample's last label."""

    read_tokens: int
    """Those that the target reads."""

    feature_rows: int
    label_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """The sizes of a target that decide what a capture takes."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    itemsize: int
    """Bytes of a number in the target's dtype."""

    num_parameters: int
    num_active_parameters: int
    """Those that one token goes through; fewer than all in a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatBytes:
    """One format of features, with the target's distribution as the settings have it."""

    name: str
    row_bytes: int
    """Of one token's tapped layers."""

    bytes_per_token: float
    """Of everything, on average over the corpus."""

    total_bytes: int
    share: float
    """Of what the field stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What a capture would write, need and take."""

    facts: CorpusFacts
    num_taps: int
    features: FeatureFormat
    target: Literal["hidden", "topk"]
    target_row_bytes: int
    """Of the target's distribution where a label is reached."""

    field_bytes_per_token: int
    field_bytes: int
    formats: tuple[FormatBytes, ...]
    total_bytes: int
    needed_bytes: int
    """On disk, with the overhead."""

    num_shards: int
    device_bytes: int
    """On the device: weights, and what one pass holds."""

    host_bytes: int
    seconds: float | None
    """None where the speed of the device is not known."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        facts = self.facts
        per_token = self.total_bytes / max(1, facts.num_tokens)
        lines = [
            f"corpus: {facts.num_samples:,} samples, {facts.num_tokens:,} tokens; kept are "
            f"{facts.feature_rows:,} rows of features and {facts.label_rows:,} with a label",
            f"output: {format_binary(self.total_bytes)} in {self.num_shards:,} files, "
            f"{per_token:,.0f} bytes a token; {format_binary(self.needed_bytes)} with "
            f"{OVERHEAD:.0%} overhead",
            f"bf16 of {self.num_taps} layers and the final one for every token would be "
            f"{self.field_bytes_per_token:,} bytes a token: {format_binary(self.field_bytes)}, "
            f"{format_binary(with_overhead(self.field_bytes))} with {OVERHEAD:.0%} overhead",
            f"the target's distribution: {self.target}, {self.target_row_bytes:,} bytes a label",
            "  format   a row of features   bytes a token   in all        of bf16",
        ]
        for entry in self.formats:
            chosen = "*" if entry.name == self.features else " "
            lines.append(
                f"{chosen} {entry.name:<8} {entry.row_bytes:>17,}   {entry.bytes_per_token:>13,.0f}"
                f"   {format_binary(entry.total_bytes):<11}   {entry.share:>7.1%}"
            )
        lines.append(
            f"memory: about {format_binary(self.device_bytes)} where the target runs, "
            f"{format_binary(self.host_bytes)} for files that are being written"
        )
        if self.seconds is not None:
            lines.append(f"time: about {self.seconds:,.0f} s at the speed measured here")
        return lines


def plan_capture(
    facts: CorpusFacts,
    target: TargetSizes,
    settings: CaptureSettings,
    *,
    num_taps: int,
    flops_per_s: float | None = None,
    disk_bytes_per_s: float | None = None,
) -> CapturePlan:
    """Bytes, memory and time; `flops_per_s` is what a large matrix product reaches on the device.

    The target reads while files are written, so that the slower of the two decides the time.
    """
    kind = choose_target_format(settings, target)
    target_row = target_row_bytes(kind, settings, target)
    field_per_token = (num_taps + 1) * target.hidden_size * _FIELD_ITEMSIZE
    field_bytes = field_per_token * facts.num_tokens
    formats = []
    for name in FORMATS:
        features_row = _taps_row_bytes(name, num_taps, target)
        total = _total_bytes(facts, features_row, target_row, target)
        formats.append(
            FormatBytes(
                name=name,
                row_bytes=features_row,
                bytes_per_token=total / max(1, facts.num_tokens),
                total_bytes=total,
                share=total / max(1, field_bytes),
            )
        )
    total = next(entry.total_bytes for entry in formats if entry.name == settings.features)
    times = []
    if flops_per_s:
        flops = 2 * target.num_active_parameters * facts.read_tokens
        times.append(flops / (_PASS_SHARE * flops_per_s))
        if disk_bytes_per_s:
            times.append(total / disk_bytes_per_s)
    num_shards = -(-facts.kept_tokens // settings.shard_tokens)
    return CapturePlan(
        facts=facts,
        num_taps=num_taps,
        features=settings.features,
        target=kind,
        target_row_bytes=target_row,
        field_bytes_per_token=field_per_token,
        field_bytes=field_bytes,
        formats=tuple(formats),
        total_bytes=total,
        needed_bytes=with_overhead(total),
        num_shards=num_shards,
        device_bytes=_device_bytes(target, settings, num_taps),
        host_bytes=_SHARDS_IN_MEMORY * total // max(1, num_shards),
        seconds=max(times) if times else None,
    )


def choose_target_format(
    settings: CaptureSettings, target: TargetSizes
) -> Literal["hidden", "topk"]:
    """How the target's distribution is kept: as asked for, or with `auto` what is smaller."""
    if settings.target != "auto":
        return settings.target
    hidden, topk = (target_row_bytes(kind, settings, target) for kind in ("hidden", "topk"))
    return "hidden" if hidden <= topk else "topk"


def target_row_bytes(kind: str, settings: CaptureSettings, target: TargetSizes) -> int:
    """Bytes of the target's distribution at one label, without what both kinds keep."""
    if kind == "topk":
        top_k = min(settings.top_k, target.draft_vocab_size)
        return top_k * (_id_bytes(target.draft_vocab_size) + _TOP_LOGPROB_BYTES)
    return row_bytes(
        settings.target_features,
        hidden_size=target.hidden_size,
        num_taps=1,
        itemsize=target.itemsize,
    )


def with_overhead(amount: int) -> int:
    return round(amount * (1 + OVERHEAD))


def format_binary(amount: int) -> str:
    """A size in powers of 1024: `80.00 MiB`."""
    size, unit = float(amount), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.2f} {_UNITS[unit]}"


def _taps_row_bytes(name: FeatureFormat, num_taps: int, target: TargetSizes) -> int:
    return row_bytes(
        name, hidden_size=target.hidden_size, num_taps=num_taps, itemsize=target.itemsize
    )


def _total_bytes(
    facts: CorpusFacts, features_row: int, target_row: int, target: TargetSizes
) -> int:
    token_bytes = _id_bytes(target.vocab_size) + 1
    label_bytes = target_row + _id_bytes(target.vocab_size) + _LOG_MASS_BYTES
    return (
        facts.kept_tokens * token_bytes
        + facts.feature_rows * features_row
        + facts.label_rows * label_bytes
    )


def _device_bytes(target: TargetSizes, settings: CaptureSettings, num_taps: int) -> int:
    """Weights; the widest layer of a pass; tapped layers twice, as they come and side by side."""
    weights = target.num_parameters * target.itemsize
    layer = (8 * target.hidden_size + 3 * target.intermediate_size) * target.itemsize
    taps = 2 * (num_taps + 1) * target.hidden_size * target.itemsize
    coding = 0 if settings.features == "exact" else num_taps * target.hidden_size * _CODEC_BYTES
    logits = min(settings.pass_tokens * target.vocab_size, _LOGITS_AT_ONCE) * _LOGIT_BYTES
    return weights + settings.pass_tokens * (taps + max(layer, coding)) + logits


def _id_bytes(vocab_size: int) -> int:
    """Of a token id, as the corpus and the features store it."""
    return int(np.dtype(token_dtype(vocab_size)).itemsize)
