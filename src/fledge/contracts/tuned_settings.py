"""What tuning found best for a head, for engines that cannot measure it themselves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.settings import (
    CONTROLLERS,
    ControllerName,
    EngineSettings,
    TreeSettings,
)

TUNING_NAME = "tune.json"
"""What a tuning measured: `rows` of depth, width, budget and speedup, and the `best` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedFor:
    """What was tuned, by names for people and by what tells it from others."""

    target: str
    head: str
    weights: str
    """Identity of the target's weights."""

    fingerprint: str
    """Of the head's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """The tree that was fastest, and the chain that was."""

    tree: TreeSettings
    chain_depth: int | None = None
    """Best length of a chain, for engines without trees; None takes the depth of the tree."""

    controller: ControllerName | None = None
    """Who decided how much of the tree was drafted, where the tuning says so."""

    made_for: TunedFor | None = None
    """None for files that were written by hand."""

    concurrency: int = 1
    """Most requests in flight that it was measured with."""

    def __post_init__(self) -> None:
        if self.controller is not None and self.controller not in CONTROLLERS:
            raise ConfigError(
                f"controller is {self.controller!r}; it must be one of {CONTROLLERS}."
            )
        if self.chain_depth is not None and not 1 <= self.chain_depth <= 64:
            raise ConfigError(
                f"chain_depth is {self.chain_depth}; it must be between 1 and 64 drafted tokens."
            )

    @property
    def chain(self) -> int:
        """Drafted tokens of a chain, root not counted."""
        return self.chain_depth or self.tree.depth


def obey(tuned: TunedSettings | None, settings: EngineSettings) -> EngineSettings:
    """Draft as tuning found best, where the settings ask for nothing else.

    A fixed tree that pays for one request is a loss in a full batch, so the tuned controller counts
    only where no more requests run together than were measured.
    """
    usual = EngineSettings()
    if tuned is None or settings.tree != usual.tree:
        return settings
    controller = settings.controller
    if (
        tuned.controller is not None
        and controller == usual.controller
        and settings.max_requests <= tuned.concurrency
    ):
        controller = tuned.controller
    return replace(settings, tree=tuned.tree, controller=controller)


def read_tuned(path: Path) -> TunedSettings:
    """The settings that a tuning found best: its directory, or its `tune.json`."""
    file = path / TUNING_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in document["rows"] if row["speedup"] is not None]
        best = document.get("best") or max(rows, key=_speed_up)
        # The chain of the final is known better than others, which may look faster by chance.
        chain = document.get("chain")
        chains = [chain] if chain else [row for row in rows if row["width"] == 1]
        tree = TreeSettings(**{name: best[name] for name in ("depth", "width", "budget")})
        chain_depth = max(chains, key=_speed_up)["depth"] if chains else None
        made_for = _made_for(document)
        controller = best.get("controller")
        loads = document.get("concurrency", 1)
        concurrency = max(loads) if isinstance(loads, list) else int(loads)
    except OSError as error:
        raise ArtifactError(f"there are no tuned settings at {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{file} does not hold what a tuning measured ({type(error).__name__}: {error}); "
            "give the directory that it wrote."
        ) from error
    return TunedSettings(
        tree=tree,
        chain_depth=chain_depth,
        controller=controller,
        made_for=made_for,
        concurrency=concurrency,
    )


def _made_for(document: Mapping[str, Any]) -> TunedFor | None:
    found = document.get("made_for")
    if found is None:
        return None
    return TunedFor(
        target=document["target"],
        head=document["head"],
        weights=found["weights"],
        fingerprint=found["head"],
    )


def _speed_up(row: Mapping[str, Any]) -> float:
    return float(row["speedup"])
