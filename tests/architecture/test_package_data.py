"""What pip installs holds the files that are no Python: heads, pages, prompts, native sources."""

import hashlib
import tomllib
from pathlib import Path

from fledge.lab.shipping import CARD_NAME, MOST_BYTES
from fledge.models.head_weights import WEIGHTS
from fledge.models.shipped_heads import find_shipped_head, list_shipped_heads
from fledge.store.catalogue import CATALOGUE
from fledge.store.manifest import MANIFEST_NAME

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


def test_shipped_heads_are_whole_and_the_default_of_their_targets() -> None:
    for head in list_shipped_heads():
        assert head.target in CATALOGUE
        default = find_shipped_head(head.target)
        assert default is not None, f"{head.target} is made of another file by now"
        assert default.directory == head.directory
        assert "cpu" in head.tuned_kinds, "the demo runs on CPUs"
        files = {path.name: path for path in head.directory.iterdir()}
        assert files.keys() == {MANIFEST_NAME, *head.manifest.files}
        assert files[WEIGHTS].stat().st_size < MOST_BYTES
        for name, entry in head.manifest.files.items():
            assert hashlib.sha256(files[name].read_bytes()).hexdigest() == entry["sha256"], name
        for name in files.keys() - {WEIGHTS}:
            words = files[name].read_text(encoding="utf-8")
            assert not any(place in words for place in ('"/', "/tmp/", "/home/")), name
        assert f"# EAGLE-3 head for {head.target}" in files[CARD_NAME].read_text(encoding="utf-8")
