"""A copy of a GGUF file without its vocabulary.

transformers goes through every token of the vocabulary each time it opens a file, which takes far
longer than reading the weights; it needs the vocabulary's size only. The size stays in the copy as
a number under the keys where transformers looks for it.
"""

import shutil
import struct
from pathlib import Path

from fledge.models.gguf_header import MAGIC, GgufHeader, align
from fledge.store.hashing import CHUNK_BYTES

_VERSION = 3
_UINT32 = 4
_TOKENS = "tokenizer.ggml.tokens"
_VOCABULARY = frozenset(
    f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")
)

_COUNT_TOKENS = frozenset({"gpt2", "starcoder2"})
"""Architectures for which transformers counts the tokens itself, so they must be there."""


def is_slimmable(header: GgufHeader) -> bool:
    """Whether transformers reads the same model from a copy without vocabulary."""
    return header.architecture not in _COUNT_TOKENS


def write_slim_copy(source: Path, header: GgufHeader, copy: Path) -> None:
    """Write `copy`, which has the same tensors and settings as `source` and no vocabulary."""
    num_tokens = header.metadata.get(_TOKENS)
    sizes = {_TOKENS: num_tokens, f"{header.architecture}.vocab_size": num_tokens}
    added = {
        key: value
        for key, value in sizes.items()
        if isinstance(value, int) and (key in _VOCABULARY or key not in header.spans)
    }
    kept = [span for key, span in header.spans.items() if key not in _VOCABULARY]
    with source.open("rb") as file, copy.open("wb") as sink:
        counts = (len(header.tensor_names), len(kept) + len(added))
        sink.write(MAGIC + struct.pack("<IQQ", _VERSION, *counts))
        for span in [*kept, header.tensor_table]:
            if span is header.tensor_table:
                sink.writelines(_number_field(key, value) for key, value in added.items())
            file.seek(span.start)
            sink.write(file.read(span.stop - span.start))
        sink.write(bytes(align(sink.tell(), header.alignment) - sink.tell()))
        file.seek(header.data_start)
        shutil.copyfileobj(file, sink, CHUNK_BYTES)


def _number_field(key: str, value: int) -> bytes:
    name = key.encode()
    return struct.pack(f"<Q{len(name)}sII", len(name), name, _UINT32, value)
