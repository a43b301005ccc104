"""One file of features, in safetensors: an index of its samples, then the samples end to end.

    header            8 bytes with its length, then JSON; every tensor by name, type and place
    index.numbers     [S] int64     numbers of the samples in the corpus
    index.row_hashes  [S] uint64    of the conversations they were made of (`row_hash`)
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
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.store.feature_layout import EncodedSample, FeatureLayout, Part
from fledge.store.place import Chunk, Place

SHARD_LAYOUT = 1
ALIGNED_BYTES = 16
INDEX_TYPES = {
    "numbers": "<i8",
    "row_hashes": "<u8",
    "starts": "<i8",
    "sizes": "<i8",
    "xxh3": "<u8",
    "counts": "<i4",
}

_METADATA = "fledge"
_FIRST_READ_BYTES = 256 << 10
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
    """Where each part of a sample lies, and its bytes in all, a multiple of 16."""
    places, at = {}, 0
    for name, part, row_bytes in _ordered_parts(layout):
        num_rows = int(getattr(counts, part.counted))
        places[name] = Slice(at, at + num_rows * row_bytes, part, num_rows)
        at = places[name].stop
    return places, -(-at // ALIGNED_BYTES) * ALIGNED_BYTES


@lru_cache(maxsize=8)
def _ordered_parts(layout: FeatureLayout) -> tuple[tuple[str, Part, int], ...]:
    """Wide numbers come first, so that each part begins at a multiple of its own width."""
    ordered = sorted(layout.parts.items(), key=lambda item: -item[1].numpy_dtype.itemsize)
    return tuple((name, part, part.row_bytes) for name, part in ordered)


def unpack_arrays(
    content: memoryview, layout: FeatureLayout, counts: SampleCounts
) -> dict[str, NDArray[Any]]:
    """The parts of a sample from its bytes; they look into them."""
    places, _ = lay_out_sample(layout, counts)
    data = np.frombuffer(content, np.uint8)
    return {
        name: data[place.start : place.stop]
        .view(place.part.numpy_dtype)
        .reshape(place.part.shape(place.num_rows))
        for name, place in places.items()
    }


class _PackedSample(NamedTuple):
    """A sample on its way to a file."""

    sample: EncodedSample
    counts: SampleCounts
    places: dict[str, Slice]
    chunks: list[Chunk]
    """Its bytes: the arrays themselves where they have the right type."""

    size: int
    xxh3: int


def _pack(sample: EncodedSample, layout: FeatureLayout) -> _PackedSample:
    num_tokens = len(sample.token_ids)
    num_labels = int(np.count_nonzero(sample.loss_mask[2:]))
    counts = SampleCounts(num_tokens, max(0, num_tokens - 2), num_labels)
    places, size = lay_out_sample(layout, counts)
    given = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask, **sample.rows}
    assert given.keys() == places.keys(), f"{sorted(given)} instead of {sorted(places)}"
    chunks = list[Chunk]()
    for name, (_, _, part, num_rows) in places.items():
        array, shape = given[name], part.shape(num_rows)
        assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
        is_coded = name in layout.coded
        assert not is_coded or array.dtype == part.numpy_dtype, f"{name} is {array.dtype}"
        plain = np.ascontiguousarray(array, part.numpy_dtype).reshape(-1).view(np.uint8)
        chunks.append(plain.data)
    chunks.append(bytes(size - sum(map(len, chunks))))
    digest = xxh3_64()
    for chunk in chunks:
        digest.update(chunk)
    return _PackedSample(sample, counts, places, chunks, size, digest.intdigest())


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
    packed = [_pack(sample, layout) for sample in samples]
    sizes = np.array([one.size for one in packed], "<i8")
    index: dict[str, NDArray[Any]] = {
        "numbers": np.array([sample.number for sample in samples], "<i8"),
        "row_hashes": np.array([sample.row_hash for sample in samples], "<u8"),
        "starts": np.zeros(len(samples), "<i8"),
        "sizes": sizes,
        "xxh3": np.array([one.xxh3 for one in packed], "<u8"),
        "counts": np.array([one.counts for one in packed], "<i4").reshape(-1, 3),
    }
    index_bytes = sum(array.nbytes for array in index.values())
    fill = -index_bytes % ALIGNED_BYTES
    entries = _index_entries(index, fill)
    at = index_bytes + fill
    for one in packed:
        entries += _sample_entries(one, at)
        at += one.size
    header = _encode_header(entries, note)
    first = len(header) + index_bytes + fill
    index["starts"] = (first + np.cumsum(sizes) - sizes).astype("<i8")
    head = header + b"".join(array.tobytes() for array in index.values()) + bytes(fill)
    chunks: list[Chunk] = [head, *(chunk for one in packed for chunk in one.chunks)]
    return chunks, ShardHead(note, index, len(header) + at, hashlib.sha256(head).hexdigest())


def _index_entries(index: Mapping[str, NDArray[Any]], fill: int) -> list[str]:
    entries, at = [], 0
    for name, array in index.items():
        kind = _SAFETENSORS[INDEX_TYPES[name]]
        entries.append(_entry(f"index.{name}", kind, array.shape, at, at + array.nbytes))
        at += array.nbytes
    return entries + _fill_entry("index", at, at + fill)


def _sample_entries(packed: _PackedSample, start: int) -> list[str]:
    number, entries, end = packed.sample.number, [], 0
    for name, (first, end, part, num_rows) in packed.places.items():
        kind, shape = _SAFETENSORS[part.dtype], part.shape(num_rows)
        entries.append(_entry(f"{number}.{name}", kind, shape, start + first, start + end))
    return entries + _fill_entry(str(number), start + end, start + packed.size)


def _fill_entry(prefix: str, start: int, stop: int) -> list[str]:
    """safetensors allows no gaps: what lies between has a name as well."""
    return (
        [] if start == stop else [_entry(f"{prefix}.{_FILL}", "U8", (stop - start,), start, stop)]
    )


def _entry(name: str, kind: str, shape: tuple[int, ...], start: int, stop: int) -> str:
    """As JSON: a shard has thousands, and whoever writes them keeps others from Python."""
    sizes = ",".join(map(str, shape))
    return f'"{name}":{{"dtype":"{kind}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}'


def _encode_header(entries: Sequence[str], note: ShardNote) -> bytes:
    told = {"layout": SHARD_LAYOUT, "plan": note.plan, "tally": note.tally}
    metadata = {_METADATA: json.dumps(told, ensure_ascii=False)}
    first = f'"__metadata__":{json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)}'
    text = ("{" + ",".join([first, *entries]) + "}").encode()
    text += b" " * (-(8 + len(text)) % ALIGNED_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_head(place: Place, name: str, size: int) -> ShardHead:
    """The head of a shard of `size` bytes."""
    file = place.file(name)
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        begin = place.read_range(name, 0, min(size, _FIRST_READ_BYTES))
        (header_len,) = struct.unpack("<Q", begin[:8].tobytes())
        if header_len > size - 8:
            raise ValueError("its header is longer than the file")
        table = json.loads(_extend(place, name, begin, 8 + header_len)[8:].tobytes())
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
        if not 8 + header_len <= head_len <= size:
            raise ValueError("its index is not in the file")
        head = _extend(place, name, begin, head_len)
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
    return ShardHead(note, index, num_bytes, hashlib.sha256(head).hexdigest())


def _extend(place: Place, name: str, begin: memoryview, length: int) -> memoryview:
    """The first bytes of a file; read anew only where the beginning is too short."""
    return begin[:length] if length <= len(begin) else place.read_range(name, 0, length)


def _head_len(table: Mapping[str, Any], entries: Mapping[str, Any], data_start: int) -> int:
    fill = table.get(f"index.{_FILL}")
    last = fill if fill is not None else entries["counts"]
    return data_start + int(last["data_offsets"][1])


def _take(data: memoryview, entry: Mapping[str, Any], dtype: str) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    return np.frombuffer(data[start:stop], dtype).reshape(entry["shape"])
