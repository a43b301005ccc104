"""What `fledge doctor` looks at: this machine, what is installed, what is in the cache."""

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fledge.contracts.errors import FledgeError
from fledge.models.shipped_heads import list_shipped_heads
from fledge.store.cache import default_cache_dir
from fledge.store.cache_marker import MARKER_NAME
from fledge.store.catalogue import CATALOGUE


def package_version(name: str) -> str | None:
    """Installed version of a distribution, None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def core_requirements() -> list[str]:
    """Names of the distributions fledge cannot do without, as its own metadata lists them."""
    try:
        lines = metadata.requires("fledge") or []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]


def describe_os() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def memory_bytes() -> int | None:
    """Memory of the machine, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def look_at_torch() -> dict[str, Any]:
    """CUDA as torch sees it, or why torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken CUDA library shows up as OSError
        return {"error": str(error).splitlines()[0], "cuda_build": None, "devices": []}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "bfloat16": properties.major >= 8,
            }
        )
    return {"error": None, "cuda_build": torch.version.cuda, "devices": devices}


def look_at_cache() -> dict[str, Any]:
    """Where targets are kept, how much room there is, and which are there."""
    root = default_cache_dir()
    existing = next(place for place in (root, *root.parents) if place.exists())
    return {
        "directory": str(root),
        "is_writable": os.access(existing, os.W_OK | os.X_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "targets": _cached_targets(root / "targets"),
    }


def _cached_targets(folder: Path) -> list[dict[str, Any]]:
    found = []
    for directory in sorted(folder.glob("*")) if folder.is_dir() else []:
        try:
            marker = json.loads((directory / MARKER_NAME).read_text(encoding="utf-8"))
            sizes = marker["files"].values()
            found.append(
                {"name": str(marker["source"]), "directory": str(directory), "bytes": sum(sizes)}
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # being made now, or not ours
    return found


def look_at_heads() -> dict[str, Any]:
    """Heads that come with fledge, or what is wrong with them."""
    try:
        found = list_shipped_heads()
    except FledgeError as error:
        return {"error": str(error), "heads": []}
    heads = [
        {
            "target": head.target,
            "directory": str(head.directory),
            "bytes": head.stored_bytes,
            "tuned": list(head.tuned_kinds),
        }
        for head in found
    ]
    return {"error": None, "heads": heads}


def has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def aliases_carried_by(carrier: str) -> list[str]:
    """Built-in targets that need this package manager."""
    return [alias.name for alias in CATALOGUE.values() if alias.carrier == carrier]


def python_version() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])
