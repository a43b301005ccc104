"""Has this prompt been seen before: exactly, or nearly, among any number of rows on disk.

Compared is what the target is asked: system prompts, tool definitions, what users and tools said.
Answers are not, since they are made anew. Two rows are

- exact duplicates when these texts are equal after folding case, compatibility characters and
  spaces;
- near duplicates when the word 5-grams of what users and tools said are alike (`minhash.py`), the
  same numbers occur there, short lines beside long ones are equal, and system prompts and tools are
  the same words, numbers aside. A system prompt that a whole source shares would otherwise make all
  its rows alike, and so would a document that several questions are asked about, or an exercise
  that is asked again with other numbers.

New rows wait in memory, a few thousand at most, and go into the open transaction sorted by key.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import xxhash

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import DuplicateSettings
from fledge.data.duplicate_store import DuplicateStore
from fledge.data.minhash import MIN_WORDS, MinHasher, pack, similarity
from fledge.data.prompt_text import PromptSide, prompt_side, split_words

Duplicate = Literal["exact", "near"]

LAYOUT = 1
MAX_BUCKET = 32
"""Rows kept under one key: rows of a large family of look-alikes are compared with these only, so
that no row costs more than a few hundred comparisons."""

_MAX_WAITING = 4096
_NUMBER = re.compile(r"\d+")


class Probe(NamedTuple):
    """What a text that is long enough is looked up by."""

    keys: list[int]
    signature: bytes


class Trace(NamedTuple):
    """All that the index needs of a row."""

    text_hash: int
    probe: Probe | None


class Tracer:
    """From rows to traces: most of the work, and it needs no index."""

    def __init__(self, settings: DuplicateSettings) -> None:
        self._settings = settings
        self._hasher = MinHasher(settings.threshold)

    def trace(self, conversation: Conversation) -> Trace:
        side = prompt_side(conversation)
        return Trace(text_hash(side), self.probe(side))

    def probe(self, side: PromptSide) -> Probe | None:
        words = split_words(side.turns) if self._settings.near else []
        if len(words) < MIN_WORDS:
            return None
        numbers = " ".join(sorted(_NUMBER.findall(side.turns)))
        minima = self._hasher.minima(words)
        family = _hash(f"{numbers}\n{side.short_lines}") ^ _frame_key(side.frame)
        keys = self._hasher.keys(minima, family)
        return Probe(keys, pack(minima))


def text_hash(side: PromptSide) -> int:
    """Equal for texts that are equal; SQLite's integers have a sign, so a bit is dropped."""
    return _hash(f"{side.frame}\n\n{side.turns}") >> 1


class DuplicateIndex:
    """Prompts seen so far, in one file; nothing is durable before `commit`."""

    def __init__(self, path: Path, settings: DuplicateSettings) -> None:
        self._settings = settings
        self._tracer = Tracer(settings)
        traits = {
            "layout": LAYOUT,
            "exact": settings.exact,
            "near": settings.near,
            "threshold": settings.threshold,
        }
        self._store = DuplicateStore(path, traits)
        self._forget_waiting()

    def check(self, conversation: Conversation) -> Duplicate | None:
        """Whether an earlier row asks the same; a new one is remembered."""
        side = prompt_side(conversation)
        hashed = text_hash(side)
        if self._has_text(hashed):
            return "exact"
        return self._check_new(hashed, self._tracer.probe(side))

    def check_trace(self, trace: Trace) -> Duplicate | None:
        """The same for a row that was traced elsewhere."""
        if self._has_text(trace.text_hash):
            return "exact"
        return self._check_new(*trace)

    def _check_new(self, hashed: int, probe: Probe | None) -> Duplicate | None:
        if probe is not None:
            bucket_sizes: dict[int, int] = {}
            if self._find_similar(probe, bucket_sizes):
                return "near"
            self._remember_probe(probe, bucket_sizes)
        if self._settings.exact:
            self._new_texts.add(hashed)
        self._num_waiting += 1
        if self._num_waiting >= _MAX_WAITING:
            self._write_waiting()
        return None

    def commit(self, position: Mapping[str, Any]) -> None:
        """Make everything since the last commit durable, together with where the caller is."""
        self._write_waiting()
        self._store.commit(position)

    @property
    def position(self) -> dict[str, Any] | None:
        """What the last commit stored."""
        return self._store.position

    @property
    def num_rows(self) -> int:
        """Rows remembered, those since the last commit included."""
        return self._store.num_rows + self._num_waiting

    @property
    def bytes_per_row(self) -> float:
        """Bytes of the file over rows in it; 0 while there are none."""
        return self._store.num_bytes / self._store.num_rows if self._store.num_rows else 0.0

    def close(self) -> None:
        """Let go of the file; what was not committed is forgotten."""
        self._store.close()

    def __enter__(self) -> "DuplicateIndex":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self.close()

    def _has_text(self, hashed: int) -> bool:
        if not self._settings.exact:
            return False
        return hashed in self._new_texts or self._store.has_text(hashed)

    def _find_similar(self, probe: Probe, bucket_sizes: dict[int, int]) -> bool:
        """Compare with every row that shares a key; notes how many share which."""
        pairs = self._store.find_buckets(probe.keys)
        pairs += [(key, row) for key in probe.keys for row in self._new_bands.get(key, ())]
        seen: set[int] = set()
        for key, row in pairs:
            bucket_sizes[key] = bucket_sizes.get(key, 0) + 1
            if row not in seen:
                seen.add(row)
                other = self._new_signatures.get(row) or self._store.read_signature(row)
                if similarity(probe.signature, other) >= self._settings.threshold:
                    return True
        return False

    def _remember_probe(self, probe: Probe, bucket_sizes: Mapping[int, int]) -> None:
        row = self.num_rows + 1
        self._new_signatures[row] = probe.signature
        for key in probe.keys:
            if bucket_sizes.get(key, 0) < MAX_BUCKET:
                self._new_bands[key].append(row)

    def _write_waiting(self) -> None:
        bands = [(key, row) for key, rows in self._new_bands.items() for row in rows]
        self._store.add(self._num_waiting, self._new_texts, bands, self._new_signatures.items())
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._num_waiting = 0
        self._new_texts: set[int] = set()
        self._new_bands: defaultdict[int, list[int]] = defaultdict(list)
        self._new_signatures: dict[int, bytes] = {}


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=128)
def _frame_key(frame: str) -> int:
    """The words of system prompts and tools without numbers, so that a date does not matter."""
    return _hash(" ".join(split_words(_NUMBER.sub("", frame))))
