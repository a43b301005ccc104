"""What an engine loaded by name says about its target before it answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fledge import Engine
from fledge.contracts.progress import SilentProgress, Task
from fledge.testing import save_tiny_target


class Notes:
    """A progress that remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        with SilentProgress().task(label, total, unit) as task:
            yield task

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_it_says_where_the_target_comes_from_and_how_it_runs(tmp_path: Path) -> None:
    directory = save_tiny_target(tmp_path / "target")
    notes = Notes()
    Engine.load(str(directory), dtype="bfloat16", device="cpu", progress=notes)
    assert notes.lines == [
        f"{directory}: local directory; running in bfloat16 on cpu",
        "head: none, one token at a time",
    ]


def test_it_says_which_of_the_targets_wishes_it_does_not_fulfil(tmp_path: Path) -> None:
    """transformers would obey them even in greedy decoding, and then differ from us."""
    directory = save_tiny_target(tmp_path / "target")
    path = directory / "generation_config.json"
    wishes = json.loads(path.read_text()) | {"no_repeat_ngram_size": 3, "num_beams": 1}
    path.write_text(json.dumps(wishes))
    notes = Notes()
    Engine.load(str(directory), device="cpu", progress=notes)
    assert "asks for {'no_repeat_ngram_size': 3} in its generation_config.json" in notes.lines[2]
