"""What an export must know about the target: a few numbers of its config.json, no weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.contracts.progress import Progress
from fledge.models.head_config import HeadConfig, default_taps
from fledge.models.resolve import resolve_target


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target as the engines' rules see it."""

    name: str
    """What the user typed."""

    directory: Path
    model_type: str
    model_types: frozenset[str]
    """Of the whole model and of its text part, which differ where a model also sees or hears."""

    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def place(self) -> str:
        """Where other engines find it: as typed, or the directory that was made from it."""
        path = Path(self.name).expanduser()
        is_hub_id = "/" in self.name and not path.exists()
        return self.name if is_hub_id or path.is_dir() else str(self.directory)


def read_target_facts(name: str, *, progress: Progress | None = None) -> TargetFacts:
    """Find the target and read its sizes; of a local directory the config alone must be there."""
    directory = resolve_target(name, progress=progress, needs_weights=False).directory
    path = directory / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        text: dict[str, Any] = data.get("text_config") or data
        return TargetFacts(
            name=name,
            directory=directory,
            model_type=str(data["model_type"]),
            model_types=frozenset({data["model_type"], text.get("model_type", data["model_type"])}),
            architectures=tuple(data.get("architectures") or ()),
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
        )
    except OSError as error:
        raise ArtifactError(f"the target {name} has no readable config.json: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} does not describe a decoder-only language model ({error!r}); "
            "give the target that the head was made for."
        ) from error


def check_belongs(config: HeadConfig, target: TargetFacts) -> None:
    """Refuse a head that was made for another target."""
    pairs = (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden_size, target.hidden_size),
    )
    for name, wanted, actual in pairs:
        if wanted != actual:
            raise MismatchError(
                f"the head was made for a target with {name} {wanted}; {target.name} has {actual}. "
                "Give the target it was trained for."
            )
    taps = config.resolve_taps(target.num_layers)
    if max(taps) > target.num_layers:
        raise MismatchError(
            f"the head reads the target after {list(taps)} completed layers; {target.name} has "
            f"{target.num_layers}. Give the target it was trained for."
        )


def has_default_taps(config: HeadConfig, target: TargetFacts | None) -> bool:
    """Whether the head reads what every engine reads when it is told nothing."""
    if config.taps is None:
        return True
    return target is not None and config.taps == default_taps(target.num_layers)
