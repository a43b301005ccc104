"""Result directories as the stages leave them, with made-up figures."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.toml_settings import to_plain
from fledge.lab.bench_document import make_document
from fledge.lab.bench_figures import measure
from fledge.lab.bench_journal import Measurement
from fledge.lab.load_answer import Answer, Speculation
from fledge.lab.load_driver import ClientLoad, Drive
from fledge.lab.load_point import Point, num_requests, points_of
from fledge.store.manifest import BENCH, HEAD, SCORECARD, TUNING, Plan
from fledge.store.stage_directory import open_stage

TARGET = "smollm2-135m-instruct"
IDENTITY = {"target": TARGET}
TASKS = ("writing", "math", "code", "summaries", "translation", "questions")


def write_stage(
    path: Path, kind: str, files: Mapping[str, bytes], *, is_finished: bool = True
) -> Path:
    with open_stage(path, Plan(kind=kind, settings={}, identity=IDENTITY)) as stage:
        for name, content in files.items():
            (path / name).write_bytes(content)
        if is_finished:
            stage.finish(counts={}, files=[path / name for name in files])
    return path


def _document(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


def bench_dir(
    path: Path,
    *,
    gain: float = 2.3,
    levels: Sequence[int] = (1, 4, 16, 64),
    rates: Sequence[float] = (1.0, 8.0),
    is_finished: bool = True,
) -> Path:
    """A head that pays at light load and stops to pay under heavy load."""
    settings = BenchSettings(
        concurrency=tuple(levels), rates=tuple(rates), requests=8, waves=2, max_tokens=64,
        slo={"ttft": "500ms", "tpot": "30ms"}, gpu_prices={"H200": 3.5},
    )  # fmt: skip
    chance = random.Random(str(path.name))
    measured = [
        Measurement(
            arm=arm,
            point=point,
            repeat=repeat,
            figures=_figures(arm, point, settings, gain, chance),
        )
        for repeat in range(settings.repeats)
        for point in points_of(settings)
        for arm in ("plain", "head")
    ]
    document = make_document(
        measured,
        arms=[{"name": "plain", "target": TARGET}, {"name": "head", "target": TARGET}],
        head={
            "provenance": {"device": "cpu", "date": "2026-11-15 12:00 UTC"},
            "settings": to_plain(settings),
            "prompts": "builtin, 48 prompts",
            "client": {"s_per_chunk": 1e-4, "most_chunks_per_s": 1e4, "first_token_s": 1e-3},
        },
        is_complete=is_finished,
    )
    return write_stage(path, BENCH, {"bench.json": _document(document)}, is_finished=is_finished)


def _figures(
    arm: str, point: Point, settings: BenchSettings, gain: float, chance: random.Random
) -> dict[str, Any]:
    users = point.level if point.is_closed else point.level * 2
    token_s = 0.004 * (1 + (users / 40) ** 1.2) * chance.uniform(0.98, 1.02)
    accept = 1.0
    if arm == "head":
        accept = 2.9
        token_s /= max(0.7, gain - 0.55 * math.log2(1 + users / 4))
    answers = []
    for number in range(num_requests(point, settings)):
        due = number * 64 * token_s / (users if point.is_closed else 1)
        first = due + 0.02 + 0.0008 * users * chance.uniform(0.8, 1.6)
        times = tuple(first + place * token_s * accept for place in range(int(64 / accept)))
        said = Speculation(
            cycles=int(63 / accept),
            offered_at_depth=(20, 16, 12, 9, 6, 4) if arm == "head" else (),
            accepted_at_depth=(16, 12, 9, 6, 4, 2) if arm == "head" else (),
        )
        answers.append(
            Answer(due=due, sent=due, text_times=times, end=times[-1], num_tokens=64,
                   num_prompt_tokens=40, speculation=said)
        )  # fmt: skip
    load = ClientLoad(busy_share=0.1, lag_s=1e-4, chunks=100)
    return measure(Drive(answers=answers, client=load), point, settings)


def _interval(value: float, reach: float) -> dict[str, Any]:
    return {"value": value, "low": value - reach, "high": value + reach, "num_units": 48}


def select_dir(path: Path, *, num_heads: int = 8, is_finished: bool = True) -> Path:
    """Checkpoints of one run, the later ones better, and one that failed."""
    chance = random.Random(path.name)
    heads = []
    for rank in range(1, num_heads + 1):
        quality = 1 - (rank - 1) / (num_heads + 3)
        tasks = {}
        for place, task in enumerate(TASKS):
            accept = 1 + (1.1 + 0.35 * place) * quality * chance.uniform(0.93, 1.07)
            speed = 0.62 + 0.46 * accept * chance.uniform(0.95, 1.05)
            depths = [max(0.05, quality * (0.8 - 0.05 * i) - 0.02 * place) for i in range(6)]
            tasks[task] = {
                "speed_up": _interval(speed, 0.09),
                "accept_length": _interval(accept, 0.12),
                "figures": {"acceptance_at_depth": depths, "tokens_per_s": 240 * speed},
            }
        mean_speed = sum(one["speed_up"]["value"] for one in tasks.values()) / len(tasks)
        mean_accept = sum(one["accept_length"]["value"] for one in tasks.values()) / len(tasks)
        heads.append(
            {
                "rank": rank,
                "name": f"step-{(num_heads - rank + 1) * 200}",
                "state": "measured" if rank <= 5 else "given up",
                "error": None,
                "speed_up": _interval(mean_speed, 0.05),
                "accept_length": _interval(mean_accept, 0.06),
                "is_tied_with_best": rank == 2,
                "tasks": tasks,
            }
        )
    heads.append({"rank": None, "name": "broken", "state": "failed", "error": "no numbers"})
    best = heads[0]["name"] if num_heads else None
    card = {
        "schema": 1,
        "target": TARGET,
        "heads": heads,
        "best": best,
        "ties": [],
        "verdict": f"{best} is the fastest head.",
    }
    return write_stage(
        path, SCORECARD, {"scorecard.json": _document(card)}, is_finished=is_finished
    )


def tune_dir(path: Path) -> Path:
    rows = []
    for depth in range(1, 11):
        for width in (1, 2, 4, 8, 16):
            for budget in (8, 24, 60):
                reach = min(depth, 1 + math.log2(1 + width) + math.log2(budget) / 2)
                accept = 1 + 2.6 * (1 - 0.62**reach)
                cost = 1 + 0.05 * depth + 0.004 * min(budget, width * depth)
                speed = accept / cost
                rows.append(
                    {"depth": depth, "width": width, "budget": budget, "accept_length": accept,
                     "tokens_per_s": 240 * speed, "speedup": speed,
                     "ci": [speed - 0.05, speed + 0.05]}
                )  # fmt: skip
    document = {"target": TARGET, "head": "step-1600", "concurrency": 1, "rows": rows}
    return write_stage(path, TUNING, {"tune.json": _document(document)})


def train_dir(path: Path, *, steps: int = 400, is_finished: bool = True) -> Path:
    chance = random.Random(path.name)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        share = 1 - math.exp(-step / (steps / 4))
        loss = 5.5 - 3 * share
        lines.append({"step": step, "kind": "train", "timing": {},
                      "figures": {"loss": loss + chance.gauss(0, 0.12)}})  # fmt: skip
        if step % max(1, steps // 8) == 0:
            depths = [max(0.0, share * (0.82 - 0.06 * i)) for i in range(7)]
            ideal = 1 + sum(math.prod(depths[: i + 1]) for i in range(7))
            lines.append({"step": step, "kind": "held_out", "timing": {},
                          "figures": {"loss": loss + 0.1, "ideal_speed_up": ideal,
                                      "acceptance_at_depth": depths}})  # fmt: skip
            lines.append({"step": step, "kind": "decode", "timing": {},
                          "figures": {"accept_length": 1 + 1.8 * share}})  # fmt: skip
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return write_stage(path, HEAD, {"curves.jsonl": content}, is_finished=is_finished)


def every_dir(folder: Path) -> list[Path]:
    """One of each."""
    folder.mkdir(exist_ok=True)
    return [
        select_dir(folder / "select"),
        tune_dir(folder / "tune"),
        bench_dir(folder / "bench"),
        train_dir(folder / "train"),
    ]
