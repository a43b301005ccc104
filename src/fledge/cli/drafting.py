"""From what was typed about the head and how to draft with it to what an engine is given."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.cli.engine_options import (
    NOTHING_TYPED,
    TypedDrafting,
    check_tuned,
    drafting_controller,
    tuned_settings,
)
from fledge.cli.loading import Choice
from fledge.cli.progress import terminal_progress
from fledge.contracts.settings import DEFAULT_HEAD, NO_HEAD, EngineSettings, TreeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.models.shipped_heads import DEVICE_KINDS, ShippedHead, find_shipped_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A head and how to draft with it."""

    head: Path | None
    settings: EngineSettings
    """With the tree and the controller that were asked for, else the usual ones."""

    typed: TypedDrafting = NOTHING_TYPED

    chosen: TunedSettings | None = None
    """What --tuned or --depth and its kin say."""

    shipped: ShippedHead | None = None
    """The head, where it comes with fledge and nobody says how to draft with it."""

    def tuned_on(self, device_kind: str) -> TunedSettings | None:
        """How to draft on a kind of device, where that is known."""
        return self.chosen or self.tuned_by_kind.get(device_kind)

    def choice(self, target: str, *, dtype: str, device: str, **settings: Any) -> Choice:
        """An engine of our own that drafts so, with further settings."""
        return Choice(
            target=target,
            head=self.head,
            dtype=dtype,
            device=device,
            settings=replace(self.settings, **settings),
            tuned_by_kind=self.tuned_by_kind,
        )

    @property
    def tuned_by_kind(self) -> dict[str, TunedSettings]:
        """The tuning that comes with the head, by kind of device."""
        if self.shipped is None:
            return {}
        found = {kind: self.typed.over(self.shipped.tuned(kind)) for kind in DEVICE_KINDS}
        return {kind: tuned for kind, tuned in found.items() if tuned is not None}


def choose_drafting(
    head: str,
    *,
    target: str,
    tuned: Path | None = None,
    typed: TypedDrafting = NOTHING_TYPED,
) -> Drafting:
    """Find the head after `--head`, and refuse a tuning that was made for another one."""
    shipped = None
    if head == DEFAULT_HEAD:
        shipped = find_shipped_head(target, progress=terminal_progress())
        directory = None if shipped is None else shipped.directory
    else:
        directory = None if head == NO_HEAD else Path(head).expanduser().absolute()
    found = check_tuned(tuned_settings(tuned, typed), target=target, head=directory)
    return Drafting(
        head=directory,
        settings=EngineSettings(
            tree=TreeSettings() if found is None else found.tree,
            controller=drafting_controller(found, typed),
            copies=typed.copies,
        ),
        typed=typed,
        chosen=typed.over(found),
        shipped=shipped if found is None else None,
    )
