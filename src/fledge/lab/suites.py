"""Suites by name, by path or by address.

load_suite("builtin")                  48 prompts of our own, six tasks, always there
load_suite("builtin/math")             one task of a suite; several as builtin/math,code
load_suite("bench/gsm8k_test.jsonl")   a file: MT-bench, GSM8K, HumanEval, Spec-Bench, your own
load_suite("gsm8k")                    a known name: from the Hugging Face hub, when reachable
load_suite("hf://owner/name/FILE")     any data set there
"""

import re
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError
from fledge.contracts.progress import Progress, SilentProgress
from fledge.data.sources.hub_datasets import SCHEME, find_hub_files
from fledge.data.sources.layouts import open_rows, row_limit_bytes
from fledge.data.sources.places import SourceFile, find_local
from fledge.lab.suite_prompts import Prompt, Suite
from fledge.lab.suite_rows import COLUMNS, RowError, read_row

__all__ = ["BUILTIN", "HUB_SUITES", "Prompt", "Suite", "load_suite"]

BUILTIN = "builtin"
HUB_SUITES = {
    "mt-bench": "hf://HuggingFaceH4/mt_bench_prompts",
    "gsm8k": "hf://openai/gsm8k/main/test-00000-of-00001.parquet",
    "humaneval": "hf://openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
}
"""Where the suites of these names are on the hub. Spec-Bench is not there: give its file."""

_MAX_TURN_CHARS = 1_000_000
_TASKS = re.compile(r"(?P<name>[\w.-]+)/(?P<tasks>[\w.,-]+)")
_NAME_OF_FILE = re.compile(r"(_test|_prompts|[-_.]question)?(\.jsonl?|\.parquet|\.gz|\.zst)+$")


def load_suite(
    name_or_path: str, *, max_prompts: int = 0, progress: Progress | None = None
) -> Suite:
    """The suite; of each task at most `max_prompts`, evenly spread over it, 0 for all."""
    suite = _find(name_or_path.strip(), progress or SilentProgress())
    if max_prompts < 0:
        raise ConfigError(f"max_prompts is {max_prompts}; it must be positive, or 0 for all.")
    return _spread(suite, max_prompts) if max_prompts else suite


def _find(typed: str, progress: Progress) -> Suite:
    if not typed:
        raise ConfigError("the suite has an empty name; `builtin` is always there.")
    if typed == BUILTIN:
        return _builtin()
    if typed.startswith(f"{SCHEME}://"):
        return _read(typed.rstrip("/").rpartition("/")[2], typed, find_hub_files(typed, progress))
    if Path(typed).expanduser().exists():
        return _read(_name_of(typed), typed, find_local(typed))
    if typed in HUB_SUITES:
        return _from_hub(typed, progress)
    parts = _TASKS.fullmatch(typed)
    if parts is not None and parts["name"] in (BUILTIN, *HUB_SUITES):
        return _find(parts["name"], progress).only(parts["tasks"].split(","))
    known = ", ".join((BUILTIN, *HUB_SUITES))
    raise ConfigError(
        f"there is no suite {typed!r}: no file of that name, and no known suite ({known})."
    )


def _builtin() -> Suite:
    with as_file(files("fledge.lab") / "prompts" / "builtin.jsonl") as path:
        found = _read(BUILTIN, str(path), find_local(str(path)))
    return Suite(name=BUILTIN, prompts=found.prompts, source="built-in")


def _from_hub(name: str, progress: Progress) -> Suite:
    try:
        address = HUB_SUITES[name]
        return _read(name, address, find_hub_files(address, progress))
    except FetchError as error:
        raise FetchError(
            f"{error} Or give the file of the suite by its path, or take `{BUILTIN}`."
        ) from error


def _read(name: str, source: str, found: list[SourceFile]) -> Suite:
    prompts = [prompt for file in found for prompt in _read_file(file, default_task=name)]
    if not prompts:
        raise ArtifactError(f"the suite {source} has no rows; it needs one prompt at least.")
    return Suite(name=name, prompts=tuple(_distinct(prompts)), source=source)


def _read_file(file: SourceFile, *, default_task: str) -> Iterator[Prompt]:
    with closing(file.open()) as stream:
        rows, word = open_rows(
            file,
            stream,
            is_prompt_list=False,
            wanted_fields=COLUMNS,
            max_row_bytes=row_limit_bytes(_MAX_TURN_CHARS),
            on_bytes=lambda num_bytes: None,
        )
        for row in rows:
            if row.problem is not None:
                raise ArtifactError(f"{file.name}, {word} {row.number}: {row.problem.detail}.")
            # A file of one prompt on each line, as `.txt` files are.
            value = {"prompt": row.value} if isinstance(row.value, str) else row.value
            try:
                yield read_row(value, place=str(row.number), default_task=default_task)
            except RowError as error:
                raise ArtifactError(f"{file.name}, {word} {row.number}: {error}.") from error


def _distinct(prompts: list[Prompt]) -> list[Prompt]:
    """Ids that tell prompts apart: some files count anew in each task."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        name = f"{prompt.task}/{prompt.id}"
        if name in seen:
            raise ArtifactError(
                f"two rows of task {prompt.task} have the id {prompt.id!r}; give each its own."
            )
        seen[name] = prompt.id
    return prompts


def _spread(suite: Suite, count: int) -> Suite:
    """Some prompts of each task: files are often sorted by kind."""
    chosen: set[int] = set()
    for task in suite.tasks:
        places = [i for i, prompt in enumerate(suite.prompts) if prompt.task == task]
        step = max(1.0, len(places) / count)
        chosen |= {places[int(i * step)] for i in range(min(count, len(places)))}
    prompts = tuple(prompt for i, prompt in enumerate(suite.prompts) if i in chosen)
    return Suite(name=suite.name, prompts=prompts, source=suite.source)


def _name_of(path: str) -> str:
    return _NAME_OF_FILE.sub("", Path(path).name) or path
