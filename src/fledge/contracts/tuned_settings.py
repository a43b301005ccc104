"""What tuning found best for a head, for engines that cannot measure it themselves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.settings import TreeSettings

TUNING_NAME = "tune.json"
"""What a tuning measured: `rows` of depth, width, budget and speedup, and the `best` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """The tree that was fastest, and the chain that was."""

    tree: TreeSettings
    chain_depth: int | None = None
    """Best length of a chain, for engines without trees; None takes the depth of the tree."""

    def __post_init__(self) -> None:
        if self.chain_depth is not None and not 1 <= self.chain_depth <= 64:
            raise ConfigError(
                f"chain_depth is {self.chain_depth}; it must be between 1 and 64 drafted tokens."
            )

    @property
    def chain(self) -> int:
        """Drafted tokens of a chain, root not counted."""
        return self.chain_depth or self.tree.depth


def read_tuned(path: Path) -> TunedSettings:
    """The settings that a tuning found best: its directory, or its `tune.json`."""
    file = path / TUNING_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in document["rows"] if row["speedup"] is not None]
        best = document.get("best") or max(rows, key=_speed_up)
        chains = [row for row in rows if row["width"] == 1]
        tree = TreeSettings(**{name: best[name] for name in ("depth", "width", "budget")})
        chain = max(chains, key=_speed_up)["depth"] if chains else None
    except OSError as error:
        raise ArtifactError(f"there are no tuned settings at {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{file} does not hold what a tuning measured ({type(error).__name__}: {error}); "
            "give the directory that it wrote."
        ) from error
    return TunedSettings(tree=tree, chain_depth=chain)


def _speed_up(row: Mapping[str, Any]) -> float:
    return float(row["speedup"])
