"""Pass times are measured once per machine and model and kept in the user's cache.

A file that is missing, damaged, of another format or of smaller passes than now asked for is
measured again; a cache that cannot be written costs a measurement at every start and nothing else.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fledge.contracts.errors import ArtifactError
from fledge.engine.pass_times import PassTimes, measure_curve
from fledge.store.cache import CacheLayout
from fledge.store.manifest import write_json

_FORMAT = 2
_CONTEXT_TOKENS = 4096
_TARGET_BUDGET_S = 6.0
_HEAD_BUDGET_S = 3.0

_log = logging.getLogger(__name__)


def machine_key(device: torch.device) -> str:
    """What pass times depend on besides the models: the chip, the threads, torch itself."""
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    else:
        chip = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return f"{chip}, torch {torch.__version__}"


def load_or_measure(
    key: str,
    cache_dir: Path,
    *,
    max_tokens: int,
    measure_target: Callable[[int], float],
    measure_head: Callable[[int], float] | None = None,
    measure_context: Callable[[int], float] | None = None,
) -> PassTimes:
    """Pass times of a machine and model, from the cache or from the machine.

    `key` names both: machine, target, head, dtype. `measure_target` and `measure_head` time one
    pass of so many tokens, `measure_context` one of few tokens with so many cached.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = CacheLayout(cache_dir).pass_times / f"{name}.json"
    asked = {
        "format": _FORMAT,
        "key": key,
        "max_tokens": max_tokens,
        "has_head": measure_head is not None,
    }
    if (known := _load(path, asked)) is not None:
        return known
    times = PassTimes(
        measure_curve(measure_target, max_tokens=max_tokens, budget_s=_TARGET_BUDGET_S),
        None
        if measure_head is None
        else measure_curve(measure_head, max_tokens=max_tokens, budget_s=_HEAD_BUDGET_S),
        context_s=0.0 if measure_context is None else _measure_context(measure_context),
    )
    _save(path, {**asked, "times": times.to_json()})
    return times


def _measure_context(measure: Callable[[int], float]) -> float:
    """Seconds for each cached token; the best of some, since noise only adds."""
    near_s, far_s = (min(measure(size) for _ in range(4)) for size in (0, _CONTEXT_TOKENS))
    return max(0.0, far_s - near_s) / _CONTEXT_TOKENS


def _load(path: Path, asked: dict[str, Any]) -> PassTimes | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        same = all(document[name] == asked[name] for name in ("format", "key", "has_head"))
        if not same or document["max_tokens"] < asked["max_tokens"]:
            return None
        return PassTimes.from_json(document["times"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ArtifactError) as error:
        _log.warning("%s cannot be used (%s); passes are measured again", path.name, error)
        return None


def _save(path: Path, document: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)
    except OSError as error:
        _log.warning("pass times are not kept: %s", error)


def _cpu_name() -> str:
    """Linux says it in a file; elsewhere the platform's word has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
