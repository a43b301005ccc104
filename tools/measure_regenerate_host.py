"""What the host does for each token while `fledge regenerate` keeps an engine busy.

The device takes no time here: every cycle says tokens by chance without running the target, so
what is left is the host's own work, which a GPU waits for where it is slower than its passes.

    python tools/measure_regenerate_host.py --rows 3000 --out FILE.json
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.progress import SilentProgress
from fledge.contracts.provenance import collect
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.settings import EngineSettings
from fledge.data.regenerate.in_process import EngineAnswerer
from fledge.data.regenerate.stage import regenerate
from fledge.engine.engine import Engine
from fledge.engine.steady_cycle import SteadyCycle
from fledge.engine.steady_reading import SteadyReader
from fledge.models.target import Target
from fledge.ops.settle import FIRST_TOKEN
from fledge.store.manifest import Plan
from fledge.store.rows import rows_file, write_rows
from fledge.store.stage_directory import open_stage
from fledge.testing import save_tiny_target

_WORDS = [
    "the",
    "of",
    "to",
    "in",
    "and",
    "is",
    "it",
    "for",
    "on",
    "with",
    "as",
    "at",
    "by",
    "from",
    "that",
    "this",
    "not",
    "are",
]


def take_no_time(vocab_size: int) -> None:
    """Have cycles and passes over prompts say anything at once."""
    chance = torch.Generator().manual_seed(0)

    def say(facts_XB: Tensor) -> None:
        facts_XB[0].fill_(1)
        facts_XB[1:FIRST_TOKEN].zero_()
        facts_XB[FIRST_TOKEN].random_(0, vocab_size, generator=chance)

    def verify(_: SteadyCycle, batch: Any, *__: Any, **___: Any) -> None:
        say(batch.facts_XB)

    def read(_: SteadyReader, reading: Any, *__: Any, **___: Any) -> None:
        say(reading.batch.facts_XB)

    cycle: Any = SteadyCycle
    reader: Any = SteadyReader
    cycle.verify, reader._run = verify, read


def make_source(directory: Path, num_rows: int) -> Path:
    chance = random.Random(0)
    rows = []
    for number in range(1, num_rows + 1):
        text = " ".join(chance.choice(_WORDS) for _ in range(chance.randint(5, 30)))
        origin = Origin(source="chat", licence="CC0-1.0", file="chat.jsonl", row=number)
        message = {"role": "user", "content": text}
        rows.append(Conversation(id=f"chat/{number}", messages=(message,), origin=origin))
    with open_stage(directory, Plan(kind="conversations", settings={})) as stage:
        write_rows(rows_file(directory, 0), rows)
        stage.finish(counts={"rows": num_rows}, files=[rows_file(directory, 0)])
    return directory


def measure(folder: Path, num_rows: int, num_in_flight: int) -> dict[str, Any]:
    directory = save_tiny_target(folder / "tiny")
    target = Target.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    take_no_time(target.vocab_size)
    source = make_source(folder / "in", num_rows)
    settings = RegenerateSettings(max_tokens=400, temperatures=(1.0,), concurrency=num_in_flight)
    engine = Engine(
        target, settings=EngineSettings(max_requests=num_in_flight, graphs="on", copies=False)
    )
    answerer = EngineAnswerer(engine, "tiny", settings)
    wall, cpu = time.perf_counter(), time.process_time()
    regenerate(source, folder / "out", settings, answerer, progress=SilentProgress())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num_tokens = engine.stats.num_tokens
    return {
        "rows": num_rows,
        "in_flight": num_in_flight,
        "tokens": num_tokens,
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "rows_per_s": round(num_rows / wall, 1),
        "tokens_per_s": round(num_tokens / wall),
        "cpu_us_per_token": round(1e6 * cpu / num_tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rows, options.in_flight)
    text = json.dumps({**found, "provenance": collect(device="cpu")}, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
