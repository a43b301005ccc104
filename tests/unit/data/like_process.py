"""Prepare with a source whose prompts are to be like those of another: BASE OUT [TRY].

As a program it dies when the target is asked for the try of this number. What is prepared is the
same with every other engine.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrepareSettings, SelfSettings, SourceSettings
from fledge.contracts.progress import SilentProgress
from fledge.data.prepare import WORK_NAME, prepare
from fledge.data.self_prompts import SelfPromptWriter
from fledge.engine.engine import Engine
from fledge.store.manifest import Manifest
from tests.unit.data.self_support import writing_engine

EXAMPLES = tuple(f"what grows in {place}" for place in ("sand", "peat", "clay", "loam", "silt"))
SETTINGS = PrepareSettings(
    sources=(
        SourceSettings(name="soils", path=("soils.txt",), licence="CC0-1.0"),
        SourceSettings(
            name="more",
            path=("self",),
            licence="CC0-1.0",
            self_prompts={"like": "soils", "shown": 3},
        ),
    ),
    self_prompts=SelfSettings(rows=6, max_tokens=40),
)


class CountingEngine(Engine):
    """Remembers the prompts that it was given, and kills its process at the one of a number."""

    dies_at = 0

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.prompts: list[tuple[int, ...]] = []

    def add(self, request: Any, **more: Any) -> Any:
        self.prompts.append(request.prompt_token_ids)
        if len(self.prompts) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().add(request, **more)


class _PromptsOf(SelfPromptWriter):
    """A writer that makes the place of its journal when it is asked, and not in an empty output."""

    def __init__(self, engine: Engine, journal: Path) -> None:
        super().__init__(engine, journal=journal)
        self._place = journal

    def __call__(self, *words: Any) -> Iterator[Conversation]:
        self._place.mkdir(parents=True, exist_ok=True)
        return super().__call__(*words)


def run(
    base: Path, out: Path, *, settings: PrepareSettings = SETTINGS, dies_at: int = 0
) -> tuple[Manifest, CountingEngine]:
    """The manifest, and the engine that was asked."""
    (base / "soils.txt").write_text("\n".join(EXAMPLES) + "\n", encoding="utf-8")
    engine = CountingEngine(writing_engine().target)
    engine.dies_at = dies_at
    manifest = prepare(
        settings,
        out,
        target="tiny",
        self_prompts=_PromptsOf(engine, out / WORK_NAME / "self"),
        progress=SilentProgress(),
        base=base,
        rows_per_save=2,
    )
    return manifest, engine


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), dies_at=int(sys.argv[3]))
