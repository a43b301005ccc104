"""Measures the two filters that remember: duplicates on invented rows, benchmarks on real ones.

Duplicates: rows/s while the index grows, bytes per row, memory. Every hundredth row repeats the one
before it, half of them with a word added, which leaves a similarity of 0.83. Benchmarks: which rows
of the files in one folder overlap with those of another, by which rule, and rows/s. The machine may
be busy with other work, so rates are also given per second of this process's CPU time.

    python tools/measure_row_filters.py --train DIR --bench DIR --out benchmarks/FILE.json
                                        [--rows 1000000]
"""

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import DecontaminateSettings, DuplicateSettings, SourceSettings
from fledge.contracts.progress import SilentProgress
from fledge.contracts.provenance import collect
from fledge.data.decontaminate import Decontaminator
from fledge.data.duplicates import DuplicateIndex
from fledge.data.sources import open_source

NUM_WORDS = 45
"""As long as a question of GSM8K."""

WINDOW_ROWS = 20_000
COMMIT_ROWS = 5_000


class Clock:
    """Rows per second of the clock and of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rates(self, num_rows: int) -> dict[str, int]:
        return {
            "rows_per_s": round(num_rows / (time.perf_counter() - self._wall)),
            "rows_per_cpu_s": round(num_rows / (time.process_time() - self._cpu)),
        }


def invented_row(number: int, vocabulary: list[str]) -> Conversation:
    is_repeat = number % 100 == 0
    words = random.Random(number - is_repeat).choices(vocabulary, k=NUM_WORDS)
    if is_repeat and number % 200 == 0:
        words.append("again")
    return Conversation(
        id=str(number),
        messages=({"role": "user", "content": " ".join(words)},),
        origin=Origin(source="invented", licence="none", file="none", row=number),
    )


def measure_duplicates(num_rows: int, directory: Path) -> dict[str, Any]:
    vocabulary = ["word" + "abcdefghij"[i % 10] * (i // 500) + str(i) for i in range(5000)]
    found: Counter[str] = Counter()
    rates: dict[int, dict[str, int]] = {}
    with DuplicateIndex(directory / "index", DuplicateSettings()) as index:
        for start in range(0, num_rows + WINDOW_ROWS, WINDOW_ROWS):
            rows = [invented_row(start + i, vocabulary) for i in range(1, WINDOW_ROWS + 1)]
            clock = Clock()
            for i, row in enumerate(rows, start=1):
                duplicate = index.check(row)
                if duplicate is not None:
                    found[duplicate] += 1
                if i % COMMIT_ROWS == 0:
                    index.commit({"row": start + i})
            rates[start] = clock.rates(WINDOW_ROWS)
        return {
            "rows": index.num_rows,
            "words_per_row": NUM_WORDS,
            "repeats_made": {"exact": start // 200 + 100, "near": start // 200 + 100},
            "repeats_found": dict(found),
            "bytes_per_row": round(index.bytes_per_row, 1),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
            "rates_by_rows_in_index": rates,
        }


def read(path: Path) -> list[Conversation]:
    source = SourceSettings(name="real", path=(str(path),), licence="see the file")
    reader = open_source(
        source, on_bad_row="skip", max_turn_chars=200_000, progress=SilentProgress()
    )
    return list(reader)


def measure_benchmarks(train: Path, bench: Path) -> dict[str, Any]:
    settings = DecontaminateSettings(against=tuple(str(path) for path in sorted(bench.iterdir())))
    decontaminator = Decontaminator(settings, SilentProgress())
    files: dict[str, Any] = {}
    for path in sorted(train.iterdir()):
        rows = read(path)
        clock = Clock()
        overlaps = [decontaminator.find(row) for row in rows]
        files[path.name] = {
            "rows": len(rows),
            "overlaps": dict(Counter(f"{one.rule} {one.benchmark}" for one in overlaps if one)),
            **clock.rates(len(rows)),
        }
    return {"ngram": settings.ngram, "files": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    benchmarks = measure_benchmarks(arguments.train, arguments.bench)
    with tempfile.TemporaryDirectory() as directory:
        duplicates = measure_duplicates(arguments.rows, Path(directory))
    document = {
        "provenance": collect(device="cpu"),
        "duplicates": duplicates,
        "benchmarks": benchmarks,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: duplicates[key] for key in ("rows", "bytes_per_row")}))


if __name__ == "__main__":
    main()
