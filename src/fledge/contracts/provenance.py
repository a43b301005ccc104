"""What a measured file must say about itself: when, with what, on what, from which commit."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("fledge", "torch", "transformers", "triton", "safetensors", "tokenizers")


def collect(*, device: str, commit: str | None = None) -> dict[str, object]:
    """Provenance of a run that is happening now; `commit` where the tree is not a checkout."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _git_commit(),
        "command": shlex.join([*_program(), *(_without_home(word) for word in sys.argv[1:])]),
        "device": device,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _program() -> list[str]:
    """How the program was started, in words that mean the same on another machine."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return ["python", "-m", script.parent.name]
    return ["fledge"] if script.name == "fledge" else ["python", _without_home(sys.argv[0])]


def _without_home(word: str) -> str:
    """Absolute paths by their last name: a published file need not say where somebody lives."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith("/") else word


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout this code runs from; "-dirty" when files were changed since."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
