"""`fledge doctor`: what this machine offers, what is missing and how to get it."""

import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

import typer

from fledge import __version__
from fledge.cli import machine, options
from fledge.cli.progress import terminal_progress
from fledge.cli.render import count, print_json
from fledge.models.fast_families import FAMILIES
from fledge.store.capacity import format_bytes, num_cores
from fledge.store.compiler import find_compiler

_PYTHONS = ((3, 11), (3, 12))
_LEAST_DISK_BYTES = 2_000_000_000
_PURPOSES = {
    "torch": "runs the networks",
    "transformers": "holds the targets' model code",
    "pip": f"fetches the built-in targets {', '.join(machine.aliases_carried_by('pip'))}",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is missing, what it is for and how to get it."""

    what: str
    purpose: str
    remedy: str
    is_needed: bool
    """Without it fledge does not work; otherwise only something is slower or not offered."""


def doctor(json: options.JsonOption = False) -> None:
    """Look at this machine: versions, devices, cache, and what is missing.

    The exit code is 1 when something that fledge needs is missing, else 0.

    Example: [cyan]fledge doctor[/cyan]
    """
    with terminal_progress().task("looking at this machine", unit=""):
        facts = _facts()
    problems = _problems(facts)
    if json:
        print_json(facts | {"problems": [asdict(problem) for problem in problems]})
    else:
        _show(facts, problems)
    if any(problem.is_needed for problem in problems):
        raise typer.Exit(1)


def _facts() -> dict[str, Any]:
    names = ("torch", "transformers", "triton")
    required = machine.core_requirements()
    return {
        "fledge": __version__,
        "python": machine.python_version(),
        "packages": {name: machine.package_version(name) for name in (*names, *required)},
        "required_packages": required,
        "os": machine.describe_os(),
        "cpu_cores": num_cores(),
        "memory_bytes": machine.memory_bytes(),
        "torch": machine.look_at_torch(),
        "fast_families": sorted(FAMILIES),
        "cache": machine.look_at_cache(),
        "shipped_heads": machine.look_at_heads(),
        "pip": machine.has_pip(),
        "npm": shutil.which("npm"),
        "cpp_compiler": find_compiler(),
    }


def _problems(facts: dict[str, Any]) -> list[Problem]:
    found = [*_software_problems(facts), *_cache_problems(facts["cache"])]
    torch = facts["torch"]
    if torch["error"] is None and not torch["devices"]:
        remedy = "needs an NVIDIA GPU and its driver"
        if torch["cuda_build"] is None:
            remedy += ", and a CUDA build of torch (this one is for CPUs)"
        found.append(Problem("no CUDA device", "GPUs are many times faster", remedy, False))
    if facts["shipped_heads"]["error"] is not None:
        remedy = "install fledge again (in its source folder: make setup)"
        what = facts["shipped_heads"]["error"]
        found.append(Problem(what, "makes the default target faster", remedy, is_needed=False))
    if facts["cpp_compiler"] is None:
        purpose = "compiles kernels with which a CPU decodes several times faster"
        found.append(Problem("no C++ compiler", purpose, "install g++ or clang++", False))
    if facts["npm"] is None:
        names = ", ".join(machine.aliases_carried_by("npm"))
        found.append(
            Problem("no npm", f"fetches the targets {names}", "install Node.js", is_needed=False)
        )
    return found


def _software_problems(facts: dict[str, Any]) -> list[Problem]:
    found = []
    if sys.version_info[:2] not in _PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
        found.append(
            Problem(f"Python {facts['python']}", "runs fledge", f"use Python {wanted}", True)
        )
    for name in facts["required_packages"] or ["torch", "transformers"]:
        if facts["packages"][name] is None:
            purpose = _PURPOSES.get(name, "is a part of fledge")
            remedy = "install fledge again (in its source folder: make setup)"
            found.append(Problem(f"no {name}", purpose, remedy, is_needed=True))
    error = facts["torch"]["error"]
    if error is not None and facts["packages"]["torch"] is not None:
        remedy = "install torch again, in a build for this machine"
        found.append(Problem(f"torch cannot be loaded ({error})", _PURPOSES["torch"], remedy, True))
    return found


def _cache_problems(cache: dict[str, Any]) -> list[Problem]:
    directory, remedy = cache["directory"], "set FLEDGE_CACHE to another directory"
    if not cache["is_writable"]:
        purpose = "fetched targets are kept there"
        return [Problem(f"no right to write to the cache {directory}", purpose, remedy, True)]
    if cache["free_bytes"] < _LEAST_DISK_BYTES:
        free = format_bytes(cache["free_bytes"])
        purpose = "fetched targets need 0.6 to 9 GB each"
        return [Problem(f"only {free} free at the cache {directory}", purpose, remedy, False)]
    return []


def _show(facts: dict[str, Any], problems: list[Problem]) -> None:
    rows = [
        *_machine_rows(facts),
        *_head_rows(facts["shipped_heads"]["heads"]),
        *_cache_rows(facts["cache"]),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for problem in problems:
        mark = "MISSING " if problem.is_needed else "optional"
        print(f"{mark}  {problem.what}: {problem.purpose}; {problem.remedy}")
    num_needed = sum(problem.is_needed for problem in problems)
    print(f"{count(num_needed, 'problem')} to solve" if num_needed else "fledge is ready to use")


def _machine_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    packages, memory = facts["packages"], facts["memory_bytes"]
    rows = [("fledge", facts["fledge"]), ("Python", f"{facts['python']} ({sys.executable})")]
    rows += [(name, packages[name] or "-") for name in ("torch", "transformers", "triton")]
    rows += [
        ("system", facts["os"]),
        ("CPU cores", str(facts["cpu_cores"])),
        ("memory", "unknown" if memory is None else format_bytes(memory)),
    ]
    for index, device in enumerate(facts["torch"]["devices"]):
        precision = "bfloat16" if device["bfloat16"] else "no bfloat16"
        size = format_bytes(device["memory_bytes"])
        rows.append((f"cuda:{index}", f"{device['name']}, {size}, {precision}"))
    if not facts["torch"]["devices"]:
        rows.append(("CUDA", "no device"))
    rows.append(("fast targets", f"{', '.join(facts['fast_families'])}; others are slower"))
    rows += [("pip", "yes" if facts["pip"] else "no"), ("npm", facts["npm"] or "no")]
    rows.append(("C++ compiler", facts["cpp_compiler"] or "no: CPUs are slower"))
    return rows


def _head_rows(heads: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The default head of each target that has one."""
    rows = []
    for head in heads:
        tuned = f", tuned for {' and '.join(head['tuned'])}" if head["tuned"] else ""
        size = format_bytes(head["bytes"])
        rows.append(("shipped head", f"{head['target']}, {size}{tuned}: {head['directory']}"))
    return rows or [("shipped head", "none")]


def _cache_rows(cache: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("cache", f"{cache['directory']} ({format_bytes(cache['free_bytes'])} free)")]
    rows += [
        (
            "cached target" if index == 0 else "",
            f"{target['name']}, {format_bytes(target['bytes'])}",
        )
        for index, target in enumerate(cache["targets"])
    ]
    return rows if cache["targets"] else [*rows, ("cached target", "none yet")]
