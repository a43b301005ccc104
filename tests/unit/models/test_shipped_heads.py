"""Heads that come with fledge: found for their own target, ignored for every other."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import ArtifactError
from fledge.contracts.tuned_settings import TunedSettings, obey
from fledge.models import shipped_heads
from fledge.models.shipped_heads import (
    ShippedHead,
    describe_drafting,
    find_shipped_head,
    list_shipped_heads,
    tuning_file,
)
from fledge.store.catalogue import CATALOGUE
from fledge.store.manifest import MANIFEST_NAME
from fledge.testing import save_tiny_target
from tests.shipped_pairs import save_random_head, ship, shipped_from, tuning

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("shipped") / NAME)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return save_random_head(target, tmp_path_factory.mktemp("head") / "run")


@pytest.fixture
def shipped(tmp_path: Path, head: Path, target: Path) -> ShippedHead:
    return ship(head, target, tmp_path / "heads")


def _with_payload(shipped: ShippedHead, sha256: str) -> None:
    """As if the target were made of this file."""
    plan = replace(
        shipped.manifest.plan, identity={**shipped.manifest.plan.identity, "payload": sha256}
    )
    replace(shipped.manifest, plan=plan).write(shipped.directory)


def test_a_directory_is_told_by_its_weights(
    shipped: ShippedHead, target: Path, tmp_path: Path
) -> None:
    root = shipped.directory.parent
    found = find_shipped_head(str(target), root=root)
    assert found is not None
    assert found.directory == root / NAME
    assert found.tuned_kinds == ()
    same_shape = save_tiny_target(tmp_path / NAME, seed=1)
    other_shape = save_tiny_target(tmp_path / "wide", hidden_size=64)
    for other in (same_shape, other_shape, tmp_path):
        assert find_shipped_head(str(other), root=root) is None


def test_a_name_is_told_by_the_file_it_is_made_of(
    shipped: ShippedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shipped.directory.parent
    assert find_shipped_head(NAME, root=root) is None
    _with_payload(shipped, CATALOGUE[NAME].sha256)
    assert find_shipped_head(NAME.upper(), root=root) is not None
    assert find_shipped_head("gemma-3-270m", root=root) is None
    assert find_shipped_head("some-org/some-model", root=root) is None
    changed = {NAME: replace(CATALOGUE[NAME], sha256="0" * 64)}
    assert find_shipped_head(NAME, root=root, catalogue=changed) is None
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir()
    # Resolving takes a directory of this name for a target only if it is one.
    assert find_shipped_head(NAME, root=root) is not None


def test_a_file_is_told_by_its_checksum(
    shipped: ShippedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    file, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    file.write_bytes(b"weights")
    other.write_bytes(b"weight!")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    _with_payload(shipped, sha256)
    root = shipped.directory.parent
    catalogue = {NAME: replace(CATALOGUE[NAME], payload_bytes=7, sha256=sha256)}
    assert find_shipped_head(str(file), root=root, catalogue=catalogue) is not None
    assert find_shipped_head(str(other), root=root, catalogue=catalogue) is None
    assert find_shipped_head(str(file), root=root) is None, "no target is made of 7 bytes"


def test_a_package_without_heads(tmp_path: Path) -> None:
    assert list_shipped_heads(tmp_path / "nothing") == []
    (tmp_path / "notes").mkdir()
    assert find_shipped_head(NAME, root=tmp_path) is None


@pytest.mark.parametrize("damage", [MANIFEST_NAME, "model.safetensors", "README.md"])
def test_a_damaged_head_is_refused(shipped: ShippedHead, damage: str) -> None:
    (shipped.directory / damage).unlink()
    with pytest.raises(ArtifactError, match="comes with fledge is damaged .* --head none"):
        find_shipped_head(NAME, root=shipped.directory.parent)


def test_tuned_settings_lie_beside_the_head(
    tmp_path: Path, shipped: ShippedHead, head: Path, target: Path
) -> None:
    assert shipped.tuned("cpu") is None
    weights = shipped.manifest.plan.identity["weights"]
    document = tuning("", weights, concurrency=[1, 8])
    (shipped.directory / tuning_file("cuda")).write_text(json.dumps(document))
    found = shipped.tuned("cuda")
    assert found is not None
    assert (found.tree, found.controller) == (TreeSettings(depth=3, width=2, budget=5), "fixed")
    assert found.concurrency == 8


def test_settings_that_ask_for_nothing_obey_the_tuning() -> None:
    tuned = TunedSettings(
        tree=TreeSettings(depth=3, width=2, budget=5), controller="fixed", concurrency=2
    )
    assert obey(None, EngineSettings()) == EngineSettings()
    alone = obey(tuned, EngineSettings(max_requests=2))
    assert (alone.tree, alone.controller) == (tuned.tree, "fixed")
    many = obey(tuned, EngineSettings())
    assert (many.tree, many.controller) == (tuned.tree, "adaptive"), "more than were measured"
    own = EngineSettings(tree=TreeSettings(depth=2), max_requests=1)
    assert obey(tuned, own) == own


def test_the_engine_takes_the_default_head(
    shipped: ShippedHead, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    document = tuning("", shipped.manifest.plan.identity["weights"])
    (shipped.directory / tuning_file("cpu")).write_text(json.dumps(document))
    one = EngineSettings(max_requests=1)
    params = SamplingParams(max_tokens=8)
    with shipped_from(shipped.directory.parent):
        drafting = Engine.load(str(target), "default", one, device="cpu")
        described = describe_drafting(shipped.directory, drafting.settings)
    plain = Engine.load(str(target), None, one, device="cpu")
    assert drafting.settings.tree == TreeSettings(depth=3, width=2, budget=5)
    assert drafting.settings.controller == "fixed"
    assert plain.settings == one
    answers = [engine.generate(["rivers"], params)[0] for engine in (drafting, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.offered_at_depth
    assert not answers[1].stats.offered_at_depth
    assert described == f"head: shipped for {NAME}; trees of depth 3, width 2, 5 nodes, fixed"


def test_what_a_load_line_says() -> None:
    settings = EngineSettings(tree=TreeSettings(depth=4, width=1, budget=8))
    assert describe_drafting(None, settings) == "head: none, one token at a time"
    assert describe_drafting(Path("my-head"), settings) == "head: my-head; chains of 4, adaptive"


@pytest.mark.parametrize("head", list_shipped_heads(), ids=lambda head: head.target)
def test_heads_of_the_package_are_whole(head: ShippedHead) -> None:
    weights = head.directory / "model.safetensors"
    entry = head.manifest.files[weights.name]
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == entry["sha256"]
    assert entry["bytes"] < 20_000_000
    alias = CATALOGUE[head.target]
    assert head.is_for_file(alias.sha256)
    assert find_shipped_head(head.target) is not None
    assert head.tuned_kinds, "it was tuned on some kind of device"
    assert head.directory.parent == shipped_heads.SHIPPED_HEADS
