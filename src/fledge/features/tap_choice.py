"""The taps of a capture: as asked for, as an earlier run of it found them, or by a probe."""

from collections.abc import Callable
from pathlib import Path

from fledge.contracts.progress import Progress
from fledge.features.capture_job import CaptureInput
from fledge.features.feature_writer import shard_names
from fledge.features.tap_probe import probe_taps
from fledge.features.taps import choose_taps
from fledge.models.target import Target
from fledge.store.manifest import FEATURES, MANIFEST_NAME, Plan, read_manifest
from fledge.store.places import open_place
from fledge.store.stage_directory import PLAN_NAME, read_plan


def settle_taps(
    given: CaptureInput, out: str | Path, load_target: Callable[[], Target], progress: Progress
) -> tuple[int, ...]:
    """Which layers are captured; `load_target` is called only where a probe has to run."""
    layers = given.settings.layers
    if layers != "auto":
        return choose_taps(given.config.get_text_config(), layers)
    found = recorded_taps(out)
    if found is not None:
        return found
    probe = probe_taps(
        given.corpus,
        given.rows,
        load_target(),
        pass_tokens=given.settings.pass_tokens,
        progress=progress,
    )
    for line in probe.lines():
        progress.note(line)
    return probe.chosen


def recorded_taps(out: str | Path) -> tuple[int, ...] | None:
    """Those that features in a directory have already; None where there are none to go on with.

    Whether they belong to the same capture is for the writer to check, which names what differs.
    """
    place = open_place(out)
    names = place.names()
    if MANIFEST_NAME in names:
        plan = read_manifest(place).plan
    elif PLAN_NAME in names and shard_names(place):
        plan = Plan(**read_plan(place))
    else:
        return None
    return tuple(plan.identity["features"]["taps"]) if plan.kind == FEATURES else None
