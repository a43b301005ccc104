"""The docs speak of things that exist: files, verbs, options, imports, measurements."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from fledge.cli.main import VERBS, app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MEASUREMENTS = sorted((ROOT / "benchmarks").glob("*.json"))
PROVENANCE = ("date", "commit", "command", "device", "packages")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^(?:\$ |\.venv/bin/)?fledge ([a-z]+)(.*)$")
_MEASUREMENT = re.compile(r"benchmarks/([\w.-]+\.json)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [body for language, body in found if language in languages]


def commands(page: Path) -> list[tuple[str, str]]:
    """Verb and options of every `fledge ...` in shell blocks and code spans."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    lines = [line for block in blocks(page, "sh", "text") for line in block.splitlines()]
    lines += [" ".join(span.split()) for span in _CODE_SPAN.findall(prose)]
    return [(match[1], match[2]) for line in lines if (match := _COMMAND.match(line.strip()))]


@pages
def test_relative_links_lead_to_files(page: Path) -> None:
    links = _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    inside = [link.split("#")[0] for link in links if not re.match(r"\w+:|#", link)]
    broken = [link for link in inside if not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to {broken}"


@pages
def test_verbs_and_options_exist(page: Path) -> None:
    for verb, rest in commands(page):
        assert verb in VERBS, f"{page.name} mentions `fledge {verb}`"
        verb_command = get_command(app).commands[verb]
        known = {
            name
            for parameter in verb_command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        typed = set(re.findall(r"(?<!\S)--[a-z-]+", re.sub(r'"[^"]*"', "", rest)))
        assert typed <= known | {"--help", "--debug"}, f"{page.name}: fledge {verb}{rest}"


def test_readme_shows_every_verb() -> None:
    assert {verb for verb, _ in commands(ROOT / "README.md")} | {"demo"} == set(VERBS)
    assert "make demo" in (ROOT / "README.md").read_text(encoding="utf-8")


@pages
def test_python_snippets_compile_and_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), node.module
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)


def test_readme_has_a_python_snippet() -> None:
    assert len(blocks(ROOT / "README.md", "python")) == 1


@pages
def test_measurements_named_in_the_docs_exist(page: Path) -> None:
    named = set(_MEASUREMENT.findall(page.read_text(encoding="utf-8")))
    assert named <= {path.name for path in MEASUREMENTS}


def test_every_measurement_is_named_in_the_docs() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unnamed = {path.name for path in MEASUREMENTS} - set(_MEASUREMENT.findall(text))
    assert not unnamed, f"no page speaks of {sorted(unnamed)}"


@pytest.mark.parametrize("path", MEASUREMENTS, ids=lambda path: path.name)
def test_measurements_say_where_they_come_from(path: Path) -> None:
    provenance = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    missing = [key for key in PROVENANCE if not provenance.get(key)]
    assert not missing, f"{path.name} does not say its {missing}"
    assert provenance["packages"]["torch"]


def test_architecture_page_stays_short() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
