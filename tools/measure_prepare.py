"""Measures how fast prepare works and how much memory it takes, on real prompts.

The files of a folder are read once and written again as one file of conversations, COPIES times,
with other numbers in front of each prompt, so that no copy is a duplicate. Each variant runs in a
process of its own: everything on, privacy off, all filters off, the same with several processes,
and, where the extra `names` is installed, names and places on a part of the rows. Memory is the
largest that the process and its workers had, for one copy and for all of them.

    python tools/measure_prepare.py --train DIR --bench DIR --out benchmarks/FILE.json [--copies 10]
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge.contracts.data_settings import (
    DecontaminateSettings,
    DuplicateSettings,
    PrepareSettings,
    PrivacySettings,
    SourceSettings,
)
from fledge.contracts.progress import SilentProgress
from fledge.contracts.provenance import collect
from fledge.data.prepare import prepare
from fledge.data.sources import open_source

NAMED_ROWS = 2000
"""Rows that names and places are looked for in: that is slow."""


def write_copies(train: Path, directory: Path, copies: int) -> dict[str, Path]:
    """The whole corpus, its first copy, and a part of it: files in OpenAI's chat form."""
    source = SourceSettings(name="train", path=(str(train),), licence="see the files")
    reader = open_source(
        source, on_bad_row="skip", max_turn_chars=200_000, progress=SilentProgress()
    )
    rows = list(reader)
    paths = {name: directory / f"{name}.jsonl" for name in ("all", "one", "part")}
    files = {name: path.open("w", encoding="utf-8") for name, path in paths.items()}
    for copy in range(copies):
        for number, row in enumerate(rows):
            first, *others = row.messages
            changed = {**first, "content": f"({copy * len(rows) + number}) {first['content']}"}
            document = {"messages": [changed, *others], "tools": list(row.tools)}
            line = json.dumps(document, ensure_ascii=False) + "\n"
            files["all"].write(line)
            if copy == 0:
                files["one"].write(line)
                if number % (len(rows) // NAMED_ROWS) == 0:
                    files["part"].write(line)
    for file in files.values():
        file.close()
    return paths


def settings_of(path: Path, bench: Path) -> dict[str, PrepareSettings]:
    everything = PrepareSettings(
        sources=(SourceSettings(name="train", path=(str(path),), licence="see the files"),),
        decontaminate=DecontaminateSettings(against=(str(bench),)),
    )
    private_off = replace(everything, privacy=PrivacySettings(enabled=False))
    return {
        "all filters": everything,
        "privacy off": private_off,
        "no filters": replace(
            private_off,
            duplicates=DuplicateSettings(exact=False, near=False),
            decontaminate=DecontaminateSettings(),
        ),
        "names and places too": replace(everything, privacy=PrivacySettings(names=True)),
    }


def run_child(variant: str, path: Path, bench: Path, num_workers: int) -> None:
    """One run in this process; prints what it took."""
    settings = settings_of(path, bench)[variant]
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        manifest = prepare(
            settings,
            Path(directory) / "out",
            target="none",
            self_prompts=None,
            progress=SilentProgress(),
            num_workers=num_workers,
        )
        wall_s = time.perf_counter() - started
        card = json.loads((Path(directory) / "out" / "card.json").read_text(encoding="utf-8"))
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_cpu_s = own.ru_utime + own.ru_stime
    cpu_s = own_cpu_s + others.ru_utime + others.ru_stime
    rows = manifest.counts["sources"]["train"]
    print(
        json.dumps(
            {
                "rows_read": rows["read"],
                "rows_out": rows["out"],
                "bytes_read": path.stat().st_size,
                "wall_s": round(wall_s, 2),
                "cpu_s": round(cpu_s, 2),
                "cpu_s_outside_workers": round(own_cpu_s, 2),
                "rows_per_s": round(rows["read"] / wall_s),
                "rows_per_cpu_s": round(rows["read"] / cpu_s),
                "mb_per_s": round(path.stat().st_size / wall_s / 1e6, 2),
                "peak_mb": round(own.ru_maxrss / 1e3),
                "peak_mb_of_a_worker": round(others.ru_maxrss / 1e3) if num_workers > 1 else None,
                "index_bytes_per_row": card["duplicate_index"]["bytes_per_row"],
                "identifiers": card["totals"]["identifiers"],
            }
        )
    )


def measure(variant: str, path: Path, bench: Path, num_workers: int = 1) -> dict[str, Any]:
    words = [variant, str(path), str(bench), str(num_workers)]
    load_before = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{variant}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    result |= {"num_workers": num_workers, "load_before": round(load_before, 2)}
    print(variant, json.dumps(result), flush=True)
    return result


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        variant, path, bench, num_workers = sys.argv[2:]
        run_child(variant, Path(path), Path(bench), int(num_workers))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=10)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "provenance": collect(device="cpu"),
        "machine": {"cores": os.cpu_count(), "load_at_start": round(os.getloadavg()[0], 2)},
        "corpus": {"copies": args.copies, "files": sorted(p.name for p in args.train.iterdir())},
        "variants": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        paths = write_copies(args.train, Path(directory), args.copies)
        variants: list[tuple[str, str, Path, int]] = [
            ("all filters", "all filters", paths["all"], 1),
            ("privacy off", "privacy off", paths["all"], 1),
            ("no filters", "no filters", paths["all"], 1),
            ("all filters, 2 workers", "all filters", paths["all"], 2),
            ("all filters, one copy", "all filters", paths["one"], 1),
        ]
        if importlib.util.find_spec("presidio_analyzer") is not None:
            variants.append(("names and places, a part", "names and places too", paths["part"], 1))
        for name, variant, path, num_workers in variants:
            report["variants"][name] = measure(variant, path, args.bench, num_workers)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
