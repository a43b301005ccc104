"""The real files of prompts: one recipe blends them all, and no benchmark prompt gets through."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge.contracts.data_settings import SourceSettings
from fledge.contracts.progress import SilentProgress
from fledge.contracts.recipe import load_recipe
from fledge.data.prepare import prepare
from fledge.store.rows import read_rows
from tests.unit.data.test_prepare import assert_counts_add_up, read_card

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2-chat.toml"
ROWS_READ = {
    "gsm8k": 7473,
    "glaive-tools": 600,
    "bfcl": 1058,
    "self-instruct": 427,
    "mbpp": 974,
    "mbpp-complete": 974,
}


def blend(shared_data: Path, base: Path) -> Path:
    """What the recipe makes, its paths followed to wherever the files are, and a leak added."""
    recipe = load_recipe(RECIPE)
    assert recipe.prepare is not None
    (base / "shared").mkdir()
    (base / "shared" / "data").symlink_to(shared_data.resolve())
    (base / "project" / "recipes").mkdir(parents=True)
    (base / "leaked.txt").write_text(
        "".join(
            " ".join(f"Please: {prompt} Thanks, {number}.".split()) + "\n"
            for number, prompt in enumerate(benchmark_prompts(shared_data / "bench"))
            if number % 4 == 0
        ),
        encoding="utf-8",
    )
    leak = SourceSettings(name="leaked", path=(str(base / "leaked.txt"),), licence="MIT")
    # Variants of whole files would take most of the time, and are tested by themselves.
    files = (one for one in recipe.prepare.sources if not one.is_self and not one.variants)
    prepare(
        replace(recipe.prepare, sources=(*files, leak)),
        base / "out",
        target=recipe.target,
        self_prompts=None,
        progress=SilentProgress(),
        base=base / "project" / "recipes",
    )
    return base / "out"


def test_the_recipe_of_the_real_files(shared_data: Path, tmp_path: Path) -> None:
    """One test, since the blend takes seconds and is looked at from three sides."""
    blended = blend(shared_data, tmp_path)
    check_counts(blended, shared_data / "train")
    check_card(blended)
    check_benchmarks(blended, shared_data / "bench")


def check_counts(blended: Path, train_data: Path) -> None:
    """Every file is blended, and the counts add up."""
    card = read_card(blended)
    entries = {entry["name"]: entry for entry in card["sources"] if entry["name"] != "leaked"}
    assert {name: entry["rows"]["read"] for name, entry in entries.items()} == ROWS_READ
    read = {file for entry in entries.values() for file in entry["files"]}
    assert read == {path.name for path in train_data.iterdir()}
    assert_counts_add_up(card, len(list(read_rows(blended))))
    assert card["rows"] > 10_000
    assert set(card["licences"]) == {"MIT", "Apache-2.0", "CC-BY-4.0"}


def check_card(blended: Path) -> None:
    """The card describes what is there."""
    output = read_card(blended)["output"]
    assert output["languages"]["en"] > 9_500
    assert 150 < output["languages"]["zh"] < 300
    assert output["rows_with"]["tools"] > 1_200
    assert output["rows_with"]["tool_calls"] > 200
    assert output["rows_with"]["many_turns"] > 200


def benchmark_prompts(directory: Path) -> Iterator[str]:
    """Every prompt of every benchmark, read without fledge."""
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row: dict[str, Any] = json.loads(line)
            yield from row.get("turns") or [row.get("prompt") or row["question"]]


def plain(text: str) -> str:
    """Letters and digits only, with single spaces around words."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def find_prompts(prompts: list[str], texts: list[str]) -> list[str]:
    """Prompts that stand in a text as a whole; short ones only count as the whole text."""
    by_start: dict[str, list[str]] = {}
    for text in texts:
        words = text.split()
        for place in range(len(words) - 3):
            by_start.setdefault(" ".join(words[place : place + 4]), []).append(text)
    whole = set(texts)

    def is_there(prompt: str) -> bool:
        start = prompt.split()[:4]
        if len(start) < 4:
            return prompt in whole
        return any(prompt in text for text in by_start.get(" ".join(start), ()))

    return [prompt for prompt in prompts if is_there(prompt)]


def check_benchmarks(blended: Path, bench_data: Path) -> None:
    """No row contains a benchmark prompt, though the source `leaked` has a quarter of them."""
    prompts = [plain(prompt) for prompt in benchmark_prompts(bench_data)]
    assert len(prompts) > 2000
    texts = [
        plain(message["content"])
        for row in read_rows(blended)
        for message in row.messages
        if message.get("content")
    ]
    assert find_prompts(prompts, texts) == []
    card = read_card(blended)
    leaked = next(entry for entry in card["sources"] if entry["name"] == "leaked")
    assert leaked["rows"]["overlaps"] > 450
    assert sum(leaked["overlaps"].values()) == leaked["rows"]["overlaps"]


def test_the_check_finds_what_is_there() -> None:
    texts = [plain("One, two, three - four five!"), plain("Go on")]
    assert find_prompts([plain("two three four five"), plain("go on"), plain("one")], texts) == [
        plain("two three four five"),
        plain("go on"),
    ]
