"""What pip installs holds the files that are no Python: heads, pages, prompts, native sources."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fledge"


def test_every_data_file_is_packed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["fledge"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    lost = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix not in {".py", ".pyc"}
        and not any(part.startswith(".") for part in path.relative_to(PACKAGE).parts)
        and path not in packed
    ]
    assert not lost, f"package-data in pyproject.toml leaves out {lost}"
    assert PACKAGE / "py.typed" in packed
