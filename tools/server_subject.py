"""A real `fledge serve` on a tiny random target, for tools that drive a server from outside."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from fledge.models.tokenizer import TargetTokenizer
from fledge.server.token_text import TokenText
from fledge.testing import save_tiny_target

MODEL = "tiny"
_PATIENCE_S = 300.0


class Subject:
    """A server that is ready, and what the system knows of its two processes."""

    def __init__(self, url: str, process_id: int) -> None:
        self.url = url
        self.process_id = process_id

    @property
    def speculation(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/speculation", timeout=60).json()
        return found

    @property
    def engine_process_id(self) -> int:
        return int(self.speculation["engine"]["facts"]["process_id"])

    def figures(self) -> dict[str, float]:
        """Every plain figure of /metrics, by its name with labels."""
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


def resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def open_files(process_id: int) -> int:
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))


def cpu_seconds(process_id: int) -> float:
    """Processor time of all threads of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def save_plain_speaker(directory: Path) -> Path:
    """A tiny target that never ends an answer and, greedy as it is by default, says ASCII only.

    A random target says half characters, which nobody can count from its text.
    """
    save_tiny_target(directory, max_position_embeddings=4096, eos_token_id=None)
    texts = TokenText(TargetTokenizer.load(directory))
    file = directory / "model.safetensors"
    weights = load_file(file)
    logits = weights["lm_head.weight"]
    plain = [number for number in range(len(logits)) if _is_plain(texts.bytes_of(number))]
    for number in set(range(len(logits))) - set(plain):
        logits[number] = logits[plain[0]] / 2  # the best logit is positive, so this is never it
    save_file(weights, file, metadata={"format": "pt"})
    (directory / "generation_config.json").write_text('{"temperature": 0.0}', encoding="utf-8")
    return directory


def _is_plain(text: bytes) -> bool:
    return len(text) == 1 and 32 < text[0] < 127


@contextmanager
def serving(place: Path, *options: str) -> Iterator[Subject]:
    """Serve such a target until the block ends; files go to `place`."""
    target = save_plain_speaker(place / "target")
    command = [sys.executable, "-m", "fledge", "serve", "--target", str(target), "--port", "0"]
    command += ["--model-name", MODEL, "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLEDGE_CACHE": str(place / "cache")}
    log = place / "server.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        yield Subject(_wait(log, process), process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(log: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"served at (\S+)/v1", log.read_text(encoding="utf-8"))
        if found and _is_ready(found[1]):
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not become ready: {log.read_text(encoding='utf-8')[-2000:]}")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
