"""How much of a decoding cycle the device is idle, and how far the cycle is from its floor.

    python tools/profile_cycles.py --target smollm2-135m-instruct --out benchmarks/FILE.json
    python tools/profile_cycles.py --shape llama-8b --out benchmarks/FILE.json

Requests decode with nothing else going on. First cycles are timed by the clock, then as many are
recorded by torch's profiler (CUPTI): when each kernel and copy began and ended on the device. What
one launch of a graph ran has one number there, so that idle time falls into three kinds:

    inside graphs      between kernels of one launch: what the hardware takes to start the next
    inside cycles      between the drafting graph and the verifying one
    between cycles     from the verifying graph to the next cycle: here the host would be to blame

Shares are of the time from the first graph's beginning to the last one's. Recording slows small
kernels down; how much is said beside them. The floor is that of `rooflines.py`.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measured_engines import PLAIN, Decoding, Results, Subject, numbers, option_parser, tree_of
from rooflines import FORMULA, Limits, floor
from torch.profiler import ProfilerActivity, profile

GRAPH_KERNELS = 8
"""A launch of at least so many kernels is a graph; single ones and copies lie between graphs."""

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_LARGEST = 5
NUM_KERNELS = 16


class Work(NamedTuple):
    """Something the device did."""

    begin_ns: int
    end_ns: int
    launch: int
    name: str

    @property
    def is_copy_to_host(self) -> bool:
        return "DtoH" in self.name


class Gap(NamedTuple):
    """Between two pieces of work when nothing ran."""

    length_ns: int
    kind: str
    before: str
    after: str


def recorded(profiler: profile) -> list[Work]:
    """All work of the device; on a CPU operations stand for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"), strict=False)["traceEvents"]
    kinds = DEVICE_KINDS if any(one.get("cat") == "kernel" for one in events) else ("cpu_op",)
    return sorted(
        Work(
            begin_ns=round(1e3 * one["ts"]),
            end_ns=round(1e3 * (one["ts"] + one["dur"])),
            launch=one["args"].get("correlation", one["args"].get("External id", 0)),
            name=one["name"],
        )
        for one in events
        if one.get("cat") in kinds
    )


def analyse(works: Sequence[Work], graph_kernels: int = GRAPH_KERNELS) -> dict[str, Any]:
    """Busy and idle time of a recording."""
    sizes: dict[int, int] = {}
    for work in works:
        sizes[work.launch] = sizes.get(work.launch, 0) + 1
    in_graphs = [place for place, one in enumerate(works) if sizes[one.launch] >= graph_kernels]
    if not in_graphs:
        return {"graphs": 0, "works": len(works)}
    works = works[in_graphs[0] : in_graphs[-1] + 1]
    graphs = {number for number, size in sizes.items() if size >= graph_kernels}
    gaps, busy_ns = find_gaps(works, graphs)
    span_ns = max(work.end_ns for work in works) - works[0].begin_ns
    idle = {kind: sum(g.length_ns for g in gaps if g.kind == kind) for kind in KINDS}
    largest = sorted((g for g in gaps if g.kind != INSIDE_GRAPHS), reverse=True)[:NUM_LARGEST]
    return {
        "graphs": len(graphs),
        "works": len(works),
        "copies_to_host": sum(work.is_copy_to_host for work in works),
        "span_s": span_ns / 1e9,
        "busy_share": busy_ns / span_ns,
        **{f"idle_{kind.replace(' ', '_')}_share": idle[kind] / span_ns for kind in KINDS},
        "idle_outside_graphs_share": (idle[INSIDE_CYCLES] + idle[BETWEEN]) / span_ns,
        "largest_gaps_outside_graphs": [
            {**gap._asdict(), "before": gap.before[:60], "after": gap.after[:60]} for gap in largest
        ],
        "kernels_with_most_time": most_time(works, span_ns),
    }


def most_time(works: Sequence[Work], span_ns: int) -> list[dict[str, Any]]:
    """Which kernels the time goes to, by name."""
    spent: dict[str, int] = {}
    counts: dict[str, int] = {}
    for work in works:
        spent[work.name] = spent.get(work.name, 0) + work.end_ns - work.begin_ns
        counts[work.name] = counts.get(work.name, 0) + 1
    largest = sorted(spent, key=spent.__getitem__, reverse=True)[:NUM_KERNELS]
    return [
        {"name": name[:80], "count": counts[name], "share": spent[name] / span_ns}
        for name in largest
    ]


INSIDE_GRAPHS, INSIDE_CYCLES, BETWEEN = "inside graphs", "inside cycles", "between cycles"
KINDS = (INSIDE_GRAPHS, INSIDE_CYCLES, BETWEEN)


def find_gaps(works: Sequence[Work], graphs: set[int]) -> tuple[list[Gap], int]:
    """Gaps with their kinds, and the time when anything ran; works may overlap."""
    gaps: list[Gap] = []
    pending: list[Gap] = []
    busy_ns, end_ns, last, last_graph = 0, works[0].begin_ns, works[0], works[0].launch
    has_read = False
    for work in works:
        if work.begin_ns > end_ns:
            gap = Gap(work.begin_ns - end_ns, INSIDE_GRAPHS, last.name, work.name)
            is_inside = work.launch == last.launch and work.launch in graphs
            (gaps if is_inside else pending).append(gap)
        if work.launch in graphs and work.launch != last_graph:
            # What a cycle said is copied to the host at the end of it.
            kind = BETWEEN if has_read else INSIDE_CYCLES
            gaps += [one._replace(kind=kind) for one in pending]
            pending, has_read, last_graph = [], False, work.launch
        has_read = has_read or work.is_copy_to_host
        busy_ns += max(0, work.end_ns - max(work.begin_ns, end_ns))
        end_ns, last = max(end_ns, work.end_ns), work
    return gaps, busy_ns


def cell(subject: Subject, way: str, size: int, limits: Limits, cycles: int) -> dict[str, Any]:
    is_cuda, length = subject.target.device.type == "cuda", subject.options.prompt_len
    levels = 1 if way == PLAIN else tree_of(way).depth + 1
    room = (2 * cycles + 20) * levels
    engine = subject.engine(way, size, length + room, graphs=subject.options.graphs)
    decoding = Decoding(engine, subject.prompts(size, length), room)
    decoding.settle()
    timed = decoding.timed(cycles)
    context = sum(seq.kv_len for seq in decoding.sequences) // size
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        slowed = decoding.timed(cycles)
    decoding.close()
    found = analyse(recorded(profiler), GRAPH_KERNELS if is_cuda else 1)
    least = floor(subject, way, size, context, limits)
    return {
        **timed,
        **found,
        "slowed_by_recording": slowed["cycle_s"] / timed["cycle_s"],
        "context_tokens": context,
        **least,
        "times_floor": timed["cycle_s"] / least["floor_s"],
        "is_gap_small": found.get("idle_outside_graphs_share", 1.0) < 0.05,
    }


def main(words: Iterable[str] | None = None) -> None:
    parser = option_parser(__doc__, budget_s=150.0)
    parser.add_argument("--ways", default="plain,5x1x5,6x4x24")
    parser.add_argument("--sizes", default="1,32")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--graphs", default="auto")
    options = parser.parse_args(None if words is None else list(words))
    ways = options.ways.split(",")
    # CUPTI stays from before the first graph is made until the end: those made without it, or
    # before it was started again, may be recorded in part.
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device="cuda")
    subject = Subject.load(options, has_head=ways != [PLAIN])
    limits = Limits(subject.target.device, subject.target.dtype)
    results = Results(
        "idle time of the device in decoding cycles, and cycle time over its floor",
        subject,
        floor=FORMULA,
        limits=limits.as_json(),
    )
    for size, way in results.left(list(itertools.product(numbers(options.sizes), ways))):
        results.add((size, way), cell(subject, way, size, limits, options.cycles))


if __name__ == "__main__":
    main()
