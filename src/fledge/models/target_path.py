"""Which layers a target's passes run on: fledge's own, or those of transformers.

Families that fledge has layers for take them by themselves once the two agree. In the environment,
`FLEDGE_TARGET_PATH=plain` runs transformers' layers everywhere, `fast` refuses a target that has no
layers of ours; in a test, `with choose_target_path("plain")`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, cast, get_args

from fledge.contracts.errors import ConfigError

TargetPath = Literal["auto", "plain", "fast"]

_chosen: list[TargetPath] = []


@contextmanager
def choose_target_path(path: TargetPath) -> Iterator[None]:
    """Inside, the given path holds for every thread of the process."""
    _chosen.append(path)
    try:
        yield
    finally:
        _chosen.pop()


def target_path() -> TargetPath:
    return _chosen[-1] if _chosen else _path_of_environment()


@cache
def _path_of_environment() -> TargetPath:
    path = os.environ.get("FLEDGE_TARGET_PATH", "auto")
    if path not in get_args(TargetPath):
        raise ConfigError(
            f"FLEDGE_TARGET_PATH is {path!r}, but must be one of "
            f"{', '.join(get_args(TargetPath))}. Set it to one of them, or leave it unset."
        )
    return cast(TargetPath, path)
