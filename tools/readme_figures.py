"""Figures of the README, made from files in benchmarks/ and from nothing else.

A block begins with a comment that names the files, and ends with another:

    <!-- demo 2026-11-17-demo-smollm2-cpu.json -->      what `fledge demo --json` printed
    <!-- table FILE.json FILE.json ... -->              demos, scorecards of select, benches
    <!-- end -->

Without options it says whether the README is as the files have it; --write makes it so. A block
that names no file is left alone.

    python tools/readme_figures.py --write
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fledge.cli.demo_page import tail_text
from fledge.data.markdown_table import render_table

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = ROOT / "README.md", ROOT / "benchmarks"
_BLOCK = re.compile(r"(<!-- (demo|table)((?: \S+\.json)+) -->\n).*?(<!-- end -->)", re.DOTALL)

Document = Mapping[str, Any]


def render(text: str, benchmarks: Path = BENCHMARKS) -> str:
    """A page with its blocks as the files have them."""

    def fill(match: "re.Match[str]") -> str:
        names = match[3].split()
        documents = {name: json.loads((benchmarks / name).read_bytes()) for name in names}
        made = _demo(documents) if match[2] == "demo" else _table(documents)
        return f"{match[1]}{made}\n{match[4]}"

    return _BLOCK.sub(fill, text)


def _demo(documents: Mapping[str, Document]) -> str:
    return "\n".join(f"```text\n{tail_text(one)}```" for one in documents.values())


def _table(documents: Mapping[str, Document]) -> str:
    rows = []
    for name, document in documents.items():
        what, found = _row(document)
        rows.append((what, f"{found} ([file](benchmarks/{name}))"))
    return render_table(("", "measured"), rows, num_left=2)


def _row(document: Document) -> tuple[str, str]:
    if "baseline_tokens_per_s" in document:
        return _demo_row(document)
    if "comparisons" in document:
        return _bench_row(document)
    return _scorecard_row(document)


def _demo_row(document: Document) -> tuple[str, str]:
    place = document["device_name"]
    if place == "cpu":
        place = f"{document['threads']} CPU threads"
    identical = "identical" if document["outputs_identical"] else "DIFFERENT"
    return (
        f"`fledge demo`: {document['target']}, {document['dtype']}, {place}",
        f"{document['baseline_tokens_per_s']:.1f} tokens/s without the head, "
        f"{document['speculative_tokens_per_s']:.1f} with it: **{document['speedup']:.2f}x**, "
        f"{identical} texts, accept length {document['accept_length']:.2f}",
    )


def _scorecard_row(document: Document) -> tuple[str, str]:
    best = next(one for one in document["heads"] if one["name"] == document["best"])
    settings = document["settings"]
    tree, temperature = settings["tree"], settings["temperature"]
    shape = f"trees of depth {tree['depth']}" if tree["width"] > 1 else f"chains of {tree['depth']}"
    how = "greedy" if not temperature else f"temperature {temperature:g}"
    lengths = ", ".join(
        f"{task} {found['accept_length']['value']:.2f}" for task, found in best["tasks"].items()
    )
    speed = best["speed_up"]
    many = f", {settings['concurrency']} requests at once" if settings["concurrency"] > 1 else ""
    return (
        f"{document['target']}, {how}, {shape}, {document['dtype']}, {document['device']}{many}",
        f"accept length {lengths}; **{speed['value']:.2f}x** plain decoding{_bounds(speed)}",
    )


def _bench_row(document: Document) -> tuple[str, str]:
    arm = document["arms"][-1]
    target = arm.get("target", arm["name"])
    rows = [row for row in document["comparisons"][0]["rows"] if row["kind"] == "closed"]
    users = ", ".join(f"{row['level']:g}" for row in rows)
    ratios = ", ".join(f"{row['speedup']['value']:.2f}" for row in rows if row["speedup"])
    return (
        f"{target} under load, {document['provenance']['device']}",
        f"throughput with the head over without, at {users} users: {ratios}",
    )


def _bounds(interval: Document) -> str:
    if interval["low"] is None:
        return ""
    return f" [{interval['low']:.2f}, {interval['high']:.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="change the README")
    given = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    made = render(text)
    if given.write:
        README.write_text(made, encoding="utf-8")
    elif made != text:
        print("README.md is not as benchmarks/ has it; run this with --write.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
