"""Manifests: equal work has equal fingerprints, and damage is noticed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, MismatchError
from fledge.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    Plan,
    read_input,
    read_manifest,
    write_json,
)

MANIFEST = Manifest(
    plan=Plan(kind="conversations", settings={"rows": 3, "paths": ("ä.jsonl", "b.jsonl")}),
    counts={"rows": 3, "by_length": {9: 1, 10: 2}},
    files={"rows-00000.jsonl": {"bytes": 5, "sha256": "00"}},
    provenance={"date": "today"},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    found = read_manifest(tmp_path)
    assert found.fingerprint == MANIFEST.fingerprint
    assert found.plan.settings == {"rows": 3, "paths": ["ä.jsonl", "b.jsonl"]}
    assert found.counts == {"rows": 3, "by_length": {"9": 1, "10": 2}}
    assert (found.files, found.provenance) == (MANIFEST.files, MANIFEST.provenance)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_NAME]


def test_the_fingerprint_leaves_out_when_and_where() -> None:
    assert replace(MANIFEST, provenance={"date": "later"}).fingerprint == MANIFEST.fingerprint
    assert replace(MANIFEST, counts={}).fingerprint != MANIFEST.fingerprint
    other = replace(MANIFEST.plan, parents={"corpus": "abc"})
    assert replace(MANIFEST, plan=other).fingerprint != MANIFEST.fingerprint


def test_names_that_are_not_unicode_are_kept(tmp_path: Path) -> None:
    odd = replace(MANIFEST, counts={"bad\udcff.jsonl": 1})
    odd.write(tmp_path)
    assert read_manifest(tmp_path).counts == {"bad\udcff.jsonl": 1}


def test_no_directory_and_unfinished_directory(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no directory .*nowhere"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"has no manifest.json: it is unfinished, or not made"):
        read_manifest(tmp_path)


def test_a_directory_of_another_kind(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    (tmp_path / "rows-00000.jsonl").write_text("12345")
    assert read_input(tmp_path, "answers", "conversations").counts["rows"] == 3
    with pytest.raises(
        MismatchError,
        match="holds conversations, not answers; give a directory that `fledge regenerate` made",
    ):
        read_input(tmp_path, "answers")
    with pytest.raises(ConfigError, match=r"manifest.json is a file; give a directory that"):
        read_input(tmp_path / MANIFEST_NAME, "corpus")


def test_lost_and_cut_files_are_named(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    with pytest.raises(ArtifactError, match=r"rows-00000.jsonl is missing, and the manifest says"):
        read_input(tmp_path, "conversations")
    (tmp_path / "rows-00000.jsonl").write_text("1234")
    with pytest.raises(ArtifactError, match=r"is 4 bytes long.* says 5 bytes; remove .* and make"):
        read_input(tmp_path, "conversations")


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 1, "plan": {"x": 1}}'],
)
def test_a_damaged_manifest(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(damage)
    with pytest.raises(ArtifactError, match="is damaged"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_layout_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / MANIFEST_NAME, {"schema": 99, "everything": "else"})
    with pytest.raises(MismatchError, match="has layout 99 and this fledge reads 1"):
        read_manifest(tmp_path)


def test_a_manifest_changed_by_hand(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    document: dict[str, Any] = json.loads((tmp_path / MANIFEST_NAME).read_text())
    document["counts"]["rows"] = 4
    write_json(tmp_path / MANIFEST_NAME, document)
    with pytest.raises(ArtifactError, match="was changed by hand"):
        read_manifest(tmp_path)
