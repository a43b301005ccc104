"""Measures whether `fledge regenerate` keeps a server busy, and what a request costs us.

A server on loopback, in a process of its own, answers after a while that depends on the request and
writes down how many requests were in flight when. Nothing else is measured than our client: the
server computes nothing.

    python tools/measure_regenerate.py --out benchmarks/FILE.json [--rounds 10] [--service-s 2 4]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.progress import SilentProgress
from fledge.contracts.provenance import collect
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.stage import regenerate
from fledge.data.regenerate.url_answerer import UrlAnswerer
from fledge.store.manifest import Plan, write_json
from fledge.store.rows import rows_file, write_rows
from fledge.store.stage_directory import open_stage

SERVER = Path(__file__).parents[1] / "tests" / "unit" / "data" / "flaky_server.py"
PROMPT = "Explain why the sky is blue, and why it is red in the evening. " * 8
SAMPLE_EVERY_S = 0.5


@contextmanager
def server(service_s: list[float], max_faults: int) -> Iterator[str]:
    """The URL of a server that runs meanwhile."""
    times = [str(seconds) for seconds in service_s]
    command = [sys.executable, str(SERVER), "--service-s", *times, "--max-faults", str(max_faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def make_conversations(directory: Path, count: int) -> Path:
    rows = (
        Conversation(
            id=f"sky/{number}",
            messages=({"role": "user", "content": f"{PROMPT} ({number})"},),
            origin=Origin(source="sky", licence="CC0-1.0", file="sky", row=number),
        )
        for number in range(1, count + 1)
    )
    with open_stage(directory, Plan(kind="conversations", settings={})) as stage:
        write_rows(rows_file(directory, 0), rows)
        stage.finish(counts={"rows": count}, files=[rows_file(directory, 0)])
    return directory


def steady_part(
    timeline: list[tuple[float, int]], concurrency: int, last_new: float
) -> tuple[float, list[tuple[float, int]]]:
    """Seconds until the server was full, and its changes from then until the rows ran out."""
    full = next(at for at, in_flight in timeline if in_flight >= concurrency)
    return full - timeline[0][0], [change for change in timeline if full <= change[0] <= last_new]


def mean_in_flight(changes: list[tuple[float, int]]) -> float:
    spans = zip(changes, changes[1:], strict=False)
    area = sum((after[0] - before[0]) * before[1] for before, after in spans)
    return area / (changes[-1][0] - changes[0][0])


def samples(timeline: list[tuple[float, int]]) -> list[int]:
    """Requests in flight at regular moments."""
    found, position, at = [], 0, timeline[0][0]
    while at <= timeline[-1][0]:
        while position + 1 < len(timeline) and timeline[position + 1][0] <= at:
            position += 1
        found.append(timeline[position][1])
        at += SAMPLE_EVERY_S
    return found


def measure(concurrency: int, rounds: int, service_s: list[float], max_faults: int) -> Any:
    settings = RegenerateSettings(concurrency=concurrency)
    silent = SilentProgress()
    with tempfile.TemporaryDirectory() as scratch, server(service_s, max_faults) as url:
        source = make_conversations(Path(scratch) / "conversations", concurrency * rounds)
        answerer = UrlAnswerer(Endpoint.parse(url), "tiny", settings, silent)
        started, cpu_started = time.perf_counter(), time.process_time()
        regenerate(source, Path(scratch) / "answers", settings, answerer, progress=silent)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        stats = httpx.get(url.removesuffix("/v1") + "/stats", trust_env=False).json()
    timeline = [(at, in_flight) for at, in_flight in stats["timeline"]]
    num_requests = concurrency * rounds + stats["faults"]
    ramp_s, steady = steady_part(timeline, concurrency, stats["last_new"])
    return {
        "concurrency": concurrency,
        "rows": concurrency * rounds,
        "requests": num_requests,
        "failed_on_purpose": stats["faults"],
        "wall_s": round(wall_s, 2),
        "client_cpu_ms_per_request": round(cpu_s / num_requests * 1e3, 3),
        "ramp_up_s": round(ramp_s, 3),
        "mean_in_flight": round(mean_in_flight(steady), 2),
        "mean_in_flight_over_concurrency": round(mean_in_flight(steady) / concurrency, 4),
        "most_in_flight": max(in_flight for _, in_flight in timeline),
        "in_flight_every_s": SAMPLE_EVERY_S,
        "in_flight": samples(timeline),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10, help="rows for each slot")
    parser.add_argument("--service-s", type=float, nargs=2, default=[2.0, 4.0])
    options = parser.parse_args()
    runs = []
    for concurrency, max_faults in ((32, 0), (256, 0), (32, 2)):
        runs.append(measure(concurrency, options.rounds, options.service_s, max_faults))
        print(json.dumps({k: v for k, v in runs[-1].items() if k != "in_flight"}))
    document = {
        "what": "requests in flight at a loopback server while regenerate asks it",
        "service_s": options.service_s,
        "prompt_bytes": len(PROMPT),
        "runs": runs,
        "provenance": collect(device="cpu"),
    }
    write_json(options.out, document)


if __name__ == "__main__":
    main()
