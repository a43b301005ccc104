"""vLLM on the same machine in the same hour: tokens a second by batch size and chain length.

    python tools/compare_vllm.py run --subject smollm2=DIR:0 --subject 8b=llama-8b:0,5,3,1,2,4 \
        --at-once 5 --largest 5=64,4=64,3=128 --out W/vllm.json
    python tools/compare_vllm.py join --subject NAME=VLLM.json,OURS.json ... --out FILE.json

`run` needs vLLM, and of fledge no more than lies beside this file. A subject is a directory or a
shape, with the chains to try. Prompts are 128 random tokens, 256 tokens are generated greedily,
end-of-text ignored, as `measure_decoding.py` does; a shape has random weights, and an EAGLE-3 head
of that shape whose drafts are right with a chance of 0.777 given those before. vLLM takes an engine
for every chain length: several of them start at once and are measured one after the other
(`vllm_engines.py`), with `--gate FILE` as soon as that file is there. Each has as much memory for
its cache as its largest batch needs. Graphs are captured for the passes that occur, with no cap.
Decode-only figures leave out a run of one token, as ours do. A chain is not measured where one
between it and the best has lost already. Everything is printed as it is found and in
W/vllm-NAME.json after every cell, and what is there already is not measured again.

`join` puts vLLM's best chain of each batch size beside ours; it measures
nothing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_engines import EngineProcess, cannot_win, load_libraries, say, wait_for
from vllm_subjects import ANSWER_LEN, PROMPT_LEN, Subject, engine_options, read_subject

_CELL_TIMEOUT_S = 90.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    run = steps.add_parser("run")
    run.add_argument("--subject", action="append", required=True, help="NAME=SHAPE_OR_DIR:CHAINS")
    run.add_argument("--sizes", type=numbers, default=(1, 8, 32, 64, 128, 256))
    run.add_argument("--largest", default="", help="CHAIN=SIZE,...: no larger batches for a chain")
    run.add_argument("--at-once", type=int, default=1, help="engines in memory together")
    run.add_argument("--gate", type=Path, action="append", default=[], help="one for each group")
    run.add_argument("--gate-s", type=float, default=600.0)
    run.add_argument("--start-s", type=float, default=240.0, help="longest start of engines")
    run.add_argument("--rate", type=float, default=0.777)
    run.add_argument("--draft-vocab", type=int, default=32000)
    run.add_argument("--answer-len", type=int, default=ANSWER_LEN)
    run.add_argument("--rounds", type=int, default=1)
    run.add_argument("--cpu", action="store_true", help="try it out: nothing captured or forced")
    run.add_argument("--budget-s", type=float, default=480.0, help="no new cell after it")
    run.add_argument("--commit", help="where the tree is not a checkout")
    run.add_argument("--out", type=Path, required=True, help="begins the names of all files")
    join = steps.add_parser("join")
    join.add_argument("--subject", action="append", required=True)
    join.add_argument("--commit", help="where the tree is not a checkout")
    join.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def beside(out: Path, end: str) -> Path:
    return out.with_name(f"{out.stem}-{end}")


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from fledge.contracts.provenance import collect  # the one part of it that is needed

    # Asking torch would start CUDA in this process, and what is forked could not use it.
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        name = "cpu"
    return collect(device=name, commit=options.commit)


class Measurement:
    """One subject's cells, on the disk after each of them."""

    def __init__(self, subject: Subject, options: argparse.Namespace, version: str) -> None:
        self.subject, self.file = subject, beside(options.out, f"{subject.name}.json")
        self.document: dict[str, Any] = {"cells": {}, "start_s": {}, "failed": {}, "skipped": {}}
        if self.file.exists():
            self.document |= json.loads(self.file.read_text(encoding="utf-8"))
        self.document |= {
            "what": "tokens per second of vLLM by chain length and batch size",
            "vllm": version,
            "target": subject.what,
            "rate": options.rate,
            "answer_len": options.answer_len,
            "provenance": provenance(options),
        }

    def speeds(self, size: int) -> dict[int, float]:
        """Of all chains that were measured at that batch size."""
        cells = self.document["cells"]
        return {
            int(chain): found[str(size)]["tokens_per_s"]
            for chain, found in cells.items()
            if str(size) in found
        }

    def missing(self, chain: int, sizes: list[int]) -> list[int]:
        return [size for size in sizes if chain not in self.speeds(size)]

    def save(self) -> None:
        text = json.dumps(self.document, indent=1) + "\n"
        self.file.write_text(text, encoding="utf-8")


class Run:
    """All engines in groups, each group started together and measured one by one."""

    def __init__(self, options: argparse.Namespace, subjects: list[Subject]) -> None:
        self.options = options
        self.ends = time.perf_counter() + options.budget_s
        self.vllm = load_libraries()
        say(f"vLLM {self.vllm.__version__} and its libraries are loaded")
        self.found = {
            one.name: Measurement(one, options, self.vllm.__version__) for one in subjects
        }
        pairs = (word.split("=") for word in options.largest.split(",") if word)
        self.largest = {int(chain): int(size) for chain, size in pairs}
        self.waiting = [
            (one, chain)
            for one in subjects
            for chain in one.chains
            if self.found[one.name].missing(chain, self.sizes(chain))
        ]
        self.failed_once: set[tuple[str, int]] = set()

    def sizes(self, chain: int) -> list[int]:
        largest = self.largest.get(chain, max(self.options.sizes))
        return [size for size in self.options.sizes if size <= largest]

    def all(self) -> None:
        gates = [*self.options.gate]
        while self.waiting and time.perf_counter() < self.ends:
            count = self.options.at_once
            group, self.waiting = self.waiting[:count], self.waiting[count:]
            engines = [(one, chain, self.start(one, chain)) for one, chain in group]
            latest = time.perf_counter() + self.options.start_s
            ready = [entry for entry in engines if self.is_up(*entry, latest)]
            self.ends += wait_for(gates.pop(0) if gates else None, self.options.gate_s)
            for entry in ready:
                self.measure(*entry)
            for *_, engine in ready:
                engine.ask_to_end()
            for *_, engine in engines:
                engine.end()

    def start(self, subject: Subject, chain: int) -> EngineProcess:
        label = f"{subject.name}-{chain}"
        say(f"starting {label}")
        given = engine_options(
            subject,
            chain,
            self.sizes(chain),
            rate=self.options.rate,
            answer_len=self.options.answer_len,
            is_cpu=self.options.cpu,
        )
        top = min(40000, subject.vocab_size)
        log = beside(self.options.out, f"{label}.log")
        return EngineProcess(label, given, lambda llm, size: self.cell(llm, size, top), log)

    def is_up(self, subject: Subject, chain: int, engine: EngineProcess, latest: float) -> bool:
        document = self.found[subject.name].document
        try:
            seconds = engine.wait(latest - time.perf_counter())
        except RuntimeError as error:
            self.note_failure(subject, chain, error)
            return False
        document["start_s"][str(chain)] = seconds
        document["failed"].pop(str(chain), None)
        say(f"{engine.label} is up after {seconds:.1f} s")
        return True

    def note_failure(self, subject: Subject, chain: int, error: RuntimeError) -> None:
        """Once more in a later group: there may be more memory then."""
        say(f"{subject.name}-{chain} failed: {error}")
        found = self.found[subject.name]
        found.document["failed"][str(chain)] = str(error)
        found.save()
        if (subject.name, chain) not in self.failed_once:
            self.failed_once.add((subject.name, chain))
            self.waiting.append((subject, chain))

    def measure(self, subject: Subject, chain: int, engine: EngineProcess) -> None:
        found = self.found[subject.name]
        for size in found.missing(chain, self.sizes(chain)):
            if time.perf_counter() > self.ends:
                say("no time for more")
                return
            slower = cannot_win(chain, found.speeds(size)) if chain else None
            if slower is not None:
                found.document["skipped"].setdefault(str(chain), {})[str(size)] = slower
                continue
            try:
                cell = engine.measure(size, _CELL_TIMEOUT_S)
            except RuntimeError as error:
                self.note_failure(subject, chain, error)
                return
            found.document["cells"].setdefault(str(chain), {})[str(size)] = cell
            found.save()
            say(f"RESULT {engine.label} batch {size} {json.dumps(cell)}")
        found.save()

    def cell(self, llm: Any, size: int, top: int) -> dict[str, Any]:
        """Runs in the engine's process."""
        chance = random.Random(size)
        ids = [[chance.randrange(100, top) for _ in range(PROMPT_LEN)] for _ in range(size)]
        prompts = [{"prompt_token_ids": one} for one in ids]

        def seconds_of(num_tokens: int) -> float:
            params = self.vllm.SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            assert sum(len(one.outputs[0].token_ids) for one in outputs) == size * num_tokens
            return seconds

        seconds_of(min(32, self.options.answer_len))  # kernels compiled at their first use
        seconds = [seconds_of(self.options.answer_len) for _ in range(self.options.rounds)]
        first_s = min(seconds_of(1) for _ in range(2))
        best, num_tokens = min(seconds), size * self.options.answer_len
        return {
            "tokens_per_s": num_tokens / best,
            "decode_tokens_per_s": (num_tokens - size) / (best - first_s),
            "seconds": seconds,
            "first_token_s": first_s,
        }


def run_all(options: argparse.Namespace) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Without a network, looking for one's own address may take long.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects = [read_subject(one, folder, options.draft_vocab) for one in options.subject]
        Run(options, subjects).all()


def main() -> None:
    options = parse()
    if options.step == "run":
        run_all(options)
        return
    import vllm_table

    document = vllm_table.join(options.subject)
    document["provenance"] = provenance(options)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(vllm_table.markdown(document))


if __name__ == "__main__":
    main()
