"""Programs that a model wrote, run where they can do no harm (`sandbox_child.py` says how)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fledge.contracts.errors import FledgeError

TIMEOUT_S = 10.0
CPU_S = 5
MEMORY_BYTES = 1 << 30

_CHILD = Path(__file__).with_name("sandbox_child.py")
_UNSAFE = b"unsafe "


class NoSandboxError(FledgeError):
    """This machine cannot keep a program from doing harm, so none is run."""


def passes(program: str, *, timeout_s: float = TIMEOUT_S, cpu_s: int = CPU_S) -> bool:
    """Whether a program comes to its end without an error, in time and within its memory."""
    secret = secrets.token_hex(16)
    job = {"program": program, "secret": secret, "memory_bytes": MEMORY_BYTES, "cpu_s": cpu_s}
    with tempfile.TemporaryDirectory(prefix="fledge-answer-") as empty:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=empty,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(job).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    if said.startswith(_UNSAFE):
        raise NoSandboxError(said.removeprefix(_UNSAFE).decode(errors="replace"))
    return said == secret.encode()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process and whatever it started; it leads a group of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
