"""The shape of the code: small files and functions, few exceptions, names that mean something."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fledge

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_TYPE_IGNORES = 20
MEANINGLESS_NAMES = {"utils", "util", "common", "helpers", "misc", "core", "base"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".cfg", ""}

_IGNORE = re.compile(r"#\s*type:\s*ignore(\[[\w, -]+\])?")
_HOME_PATH = re.compile(r"/(?:home|root|Users)/[\w.]")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> Iterator[Path]:
    """What the repository holds: the top level, and the folders that are not built or fetched."""
    folders = ("src", "tests", "tools", "docs", "benchmarks", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for path in [*found, *ROOT.iterdir()]:
        is_built = any(part.endswith((".egg-info", "__pycache__")) for part in path.parts)
        if path.is_file() and path.suffix in TEXT_SUFFIXES and not is_built:
            yield path


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_source_files_stay_small() -> None:
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("src", "tools")
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_stay_small() -> None:
    """Counted without the signature: a verb has one line for each option it takes."""
    lengths = [
        (relative(path), node.name, (node.end_lineno or node.lineno) - node.body[0].lineno + 1)
        for path in python_files("src", "tools", "tests")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [one for one in lengths if one[-1] > MAX_FUNCTION_LINES] == []


def test_type_ignores_are_few_and_name_their_code() -> None:
    found = [
        (relative(path), match[1])
        for path in python_files("src", "tools", "tests")
        if path != Path(__file__)
        for match in _IGNORE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert [name for name, code in found if code is None] == []
    assert len(found) < MAX_TYPE_IGNORES


def test_module_names_mean_something() -> None:
    names = [path for path in (ROOT / "src").rglob("*") if path.stem in MEANINGLESS_NAMES]
    assert not names, [relative(path) for path in names]


def test_public_names_are_those_of_all() -> None:
    imported: dict[str, object] = {}
    exec("from fledge import *", imported)
    imported.pop("__builtins__")
    assert sorted(imported) == sorted(fledge.__all__)
    assert set(fledge._HOMES) | {"__version__"} == set(fledge.__all__)
    with pytest.raises(AttributeError, match="module 'fledge' has no attribute 'Motor'"):
        fledge.Motor  # noqa: B018


def test_no_file_names_a_home_directory() -> None:
    named = [
        relative(path)
        for path in text_files()
        if _HOME_PATH.search(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not named
