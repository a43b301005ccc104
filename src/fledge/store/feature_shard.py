"""One file of features, in safetensors: an index of its samples, then the samples end to end.

    header            8 bytes with its length, then JSON; every tensor by name, type and place
    index.numbers     [S] int64     numbers of the samples in the corpus, ascending
    index.starts      [S] int64     first byte of each sample, from the beginning of the file
    index.sizes       [S] int64     bytes of each sample
    index.xxh3        [S] uint64    checksum of these bytes
    index.counts      [S, 3] int32  tokens, feature rows and label rows
    7.token_ids, ...  the parts of sample 7 of the corpus, without a gap

Header and index are the head of the file. Its sha256 is that of the whole shard: it covers the
checksums of all samples. The one metadata entry, `fledge`, is a JSON text.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.store.feature_layout import EncodedSample, FeatureLayout, Part
from fledge.store.place import Chunk, Place

SHARD_LAYOUT = 1
ALIGNED_BYTES = 16
INDEX_TYPES = {"numbers": "<i8", "starts": "<i8", "sizes": "<i8", "xxh3": "<u8", "counts": "<i4"}

_METADATA = "fledge"
_FILL = "fill"
_SAFETENSORS = {
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "<i4": "I32",
    "<i8": "I64",
    "<u8": "U64",
}


class SampleCounts(NamedTuple):
    """Rows of the parts of one sample."""

    tokens: int
    features: int
    labels: int


class Slice(NamedTuple):
    """Where a part lies among the bytes of its sample."""

    start: int
    stop: int
    part: Part
    num_rows: int


def lay_out_sample(layout: FeatureLayout, counts: SampleCounts) -> tuple[dict[str, Slice], int]:
    """Where each part of a sample lies, and its bytes in all, a multiple of 16.

    Wide numbers come first, so that each part begins at a multiple of its own width.
    """
    ordered = sorted(layout.parts.items(), key=lambda item: -item[1].numpy_dtype.itemsize)
    places, at = {}, 0
    for name, part in ordered:
        num_rows = int(getattr(counts, part.counted))
        places[name] = Slice(at, at + num_rows * part.row_bytes, part, num_rows)
        at = places[name].stop
    return places, -(-at // ALIGNED_BYTES) * ALIGNED_BYTES


def unpack_sample(
    data: NDArray[np.uint8], layout: FeatureLayout, number: int, counts: SampleCounts
) -> EncodedSample:
    """A sample from its bytes; its arrays look into them."""
    places, _ = lay_out_sample(layout, counts)
    arrays = {
        name: data[place.start : place.stop]
        .view(place.part.numpy_dtype)
        .reshape(place.part.shape(place.num_rows))
        for name, place in places.items()
    }
    token_ids, loss_mask = arrays.pop("token_ids"), arrays.pop("loss_mask")
    return EncodedSample(number, token_ids, loss_mask.view(np.bool_), arrays)


def pack_sample(sample: EncodedSample, layout: FeatureLayout) -> tuple[NDArray[Any], SampleCounts]:
    """The bytes of a sample, and the rows of its parts."""
    num_tokens = len(sample.token_ids)
    labels = int(np.count_nonzero(sample.loss_mask[2:]))
    counts = SampleCounts(num_tokens, max(0, num_tokens - 2), labels)
    places, size = lay_out_sample(layout, counts)
    data = np.zeros(size, np.uint8)
    given = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask, **sample.rows}
    assert given.keys() == places.keys(), f"{sorted(given)} instead of {sorted(places)}"
    for name, place in places.items():
        array, shape = given[name], place.part.shape(place.num_rows)
        assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
        is_coded = name in layout.coded
        assert not is_coded or array.dtype == place.part.numpy_dtype, f"{name}: {array.dtype}"
        data[place.start : place.stop].view(place.part.numpy_dtype).reshape(shape)[...] = array
    return data, counts


@dataclass(frozen=True, slots=True)
class ShardNote:
    """What a shard says about itself, beside its samples."""

    plan: str
    """sha256 of the plan it was made for."""

    tally: Mapping[str, Any]
    """Counts of its writer."""


@dataclass(frozen=True, slots=True)
class ShardHead:
    """The beginning of a shard: everything but the samples."""

    note: ShardNote
    index: Mapping[str, NDArray[Any]]
    """By the names of `INDEX_TYPES`."""

    num_bytes: int
    """Of the file."""

    sha256: str


def encode_shard(
    samples: Sequence[EncodedSample], layout: FeatureLayout, note: ShardNote
) -> tuple[list[Chunk], ShardHead]:
    """A shard as chunks to write one after the other; the same samples give the same bytes."""
    packed = [pack_sample(sample, layout) for sample in samples]
    sizes = np.array([len(data) for data, _ in packed], np.int64)
    index: dict[str, NDArray[Any]] = {
        "numbers": np.array([sample.number for sample in samples], "<i8"),
        "starts": np.zeros(len(samples), "<i8"),
        "sizes": sizes.astype("<i8"),
        "xxh3": np.array([xxh3_64_intdigest(data.data) for data, _ in packed], "<u8"),
        "counts": np.array([counts for _, counts in packed], "<i4").reshape(-1, 3),
    }
    index_bytes = sum(array.nbytes for array in index.values())
    entries, index_end = _index_entries(index, -index_bytes % ALIGNED_BYTES)
    for (_, counts), sample, size in zip(packed, samples, sizes, strict=True):
        places, _ = lay_out_sample(layout, counts)
        entries |= _sample_entries(sample.number, places, index_end, int(size))
        index_end += int(size)
    header = _encode_header(entries, note)
    data_start = len(header) + index_bytes + (-index_bytes % ALIGNED_BYTES)
    index["starts"] = (data_start + np.concatenate([[0], np.cumsum(sizes)])[:-1]).astype("<i8")
    head = header + b"".join(array.tobytes() for array in index.values())
    head += bytes(-index_bytes % ALIGNED_BYTES)
    chunks: list[Chunk] = [head, *(data.data for data, _ in packed)]
    found = ShardHead(note, index, len(head) + int(sizes.sum()), hashlib.sha256(head).hexdigest())
    return chunks, found


def _index_entries(index: Mapping[str, NDArray[Any]], fill: int) -> tuple[dict[str, Any], int]:
    entries, at = {}, 0
    for name, array in index.items():
        kind = _SAFETENSORS[INDEX_TYPES[name]]
        entries[f"index.{name}"] = _entry(kind, list(array.shape), at, at + array.nbytes)
        at += array.nbytes
    if fill:
        entries[f"index.{_FILL}"] = _entry("U8", [fill], at, at + fill)
    return entries, at + fill


def _sample_entries(
    number: int, places: Mapping[str, Slice], start: int, size: int
) -> dict[str, Any]:
    entries, end = {}, 0
    for name, (first, end, part, num_rows) in places.items():
        shape, kind = list(part.shape(num_rows)), _SAFETENSORS[part.dtype]
        entries[f"{number}.{name}"] = _entry(kind, shape, start + first, start + end)
    if end < size:
        entries[f"{number}.{_FILL}"] = _entry("U8", [size - end], start + end, start + size)
    return entries


def _entry(kind: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


def _encode_header(entries: Mapping[str, Any], note: ShardNote) -> bytes:
    told = {"layout": SHARD_LAYOUT, "plan": note.plan, "tally": note.tally}
    table = {"__metadata__": {_METADATA: json.dumps(told, ensure_ascii=False)}, **entries}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_head(place: Place, name: str, size: int) -> ShardHead:
    """The head of a shard of `size` bytes."""
    file = place.file(name)
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        (header_len,) = struct.unpack("<Q", place.read_range(name, 0, 8).tobytes())
        if header_len > size - 8:
            raise ValueError("its header is longer than the file")
        table = json.loads(place.read_range(name, 8, header_len).tobytes())
        told = json.loads(table["__metadata__"][_METADATA])
        if told["layout"] != SHARD_LAYOUT:
            raise MismatchError(
                f"{file} has layout {told['layout']} and this fledge reads {SHARD_LAYOUT}; capture "
                "into a new directory, or use the fledge that made it."
            )
        entries = {n: table.pop(f"index.{n}") for n in INDEX_TYPES}
        head_len = _head_len(table, entries, 8 + header_len)
        num_bytes = (
            8
            + header_len
            + max(
                entry["data_offsets"][1]
                for key, entry in {**entries, **table}.items()
                if key != "__metadata__"
            )
        )
        head = place.read_range(name, 0, head_len)
        index = {
            n: _take(head[8 + header_len :], entry, INDEX_TYPES[n]) for n, entry in entries.items()
        }
        note = ShardNote(told["plan"], told["tally"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{file} is damaged ({error}); remove it and capture again: only this file is made "
            "anew."
        ) from error
    if num_bytes != size:
        raise ArtifactError(
            f"{file} has {size} bytes and should have {num_bytes}: it was cut off; remove it and "
            "capture again: only this file is made anew."
        )
    return ShardHead(note, index, num_bytes, hashlib.sha256(head.data).hexdigest())


def _head_len(table: Mapping[str, Any], entries: Mapping[str, Any], data_start: int) -> int:
    fill = table.get(f"index.{_FILL}")
    last = fill if fill is not None else entries["counts"]
    return data_start + int(last["data_offsets"][1])


def _take(data: NDArray[np.uint8], entry: Mapping[str, Any], dtype: str) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    return data[start:stop].view(dtype).reshape(entry["shape"])
