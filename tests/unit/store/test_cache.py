"""The cache's place, lock, publishing and marker."""

import json
import threading
from pathlib import Path

import pytest

from fledge.contracts.progress import SilentProgress
from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.cache_lock import hold_lock
from fledge.store.cache_marker import MARKER_NAME, Source, find_damage, write_marker
from fledge.store.cache_publish import publish_directory
from fledge.store.hashing import hash_file_once
from tests.unit.tiny_gguf import Recorder

SOURCE = Source(source="tiny", sha256="ab" * 32, quantisation="Q8_0")


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLEDGE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "fledge"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "fledge"
    monkeypatch.setenv("FLEDGE_CACHE", "~/own")
    assert default_cache_dir() == tmp_path / "own"


def test_layout_keeps_everything_inside_the_root(tmp_path):
    layout = CacheLayout(tmp_path)
    for path in (layout.target("k"), layout.downloads("k"), layout.lock("k"), layout.hashes):
        assert path.is_relative_to(tmp_path)


def test_lock_admits_one_and_says_that_the_other_waits(tmp_path):
    recorder, order = Recorder(), []
    lock = tmp_path / "locks" / "k.lock"

    def second() -> None:
        with hold_lock(lock, what="tiny", progress=recorder):
            order.append("second")

    with hold_lock(lock, what="tiny", progress=SilentProgress()):
        thread = threading.Thread(target=second)
        thread.start()
        while not recorder.notes:
            thread.join(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert recorder.notes == ["another fledge process is preparing tiny; waiting for it"]


def test_publish_replaces_whole_directories_and_clears_leftovers(tmp_path):
    final = tmp_path / "targets" / "tiny"
    dead = tmp_path / "targets" / ".tiny.999.tmp"
    final.mkdir(parents=True)
    dead.mkdir()
    (final / "old").write_text("old")
    with publish_directory(final) as temporary:
        assert not dead.exists()
        (temporary / "new").write_text("new")
        assert (final / "old").exists()
    assert [path.name for path in final.iterdir()] == ["new"]
    assert [path.name for path in final.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_publish_leaves_nothing(tmp_path, error):
    final = tmp_path / "tiny"

    def fail() -> None:
        with publish_directory(final) as temporary:
            (temporary / "half").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def make_target(directory: Path) -> Path:
    (directory / "sub").mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(100))
    (directory / "sub" / "more").write_bytes(b"x")
    write_marker(directory, SOURCE)
    return directory


def test_whole_target_has_no_damage(tmp_path):
    assert find_damage(make_target(tmp_path / "t"), SOURCE.sha256) is None


def test_damage_is_named(tmp_path):
    target = make_target(tmp_path / "t")
    (target / "weights").write_bytes(bytes(99))
    assert find_damage(target, SOURCE.sha256) == "weights has 99 bytes instead of 100"
    (target / "weights").unlink()
    assert find_damage(target, SOURCE.sha256) == "weights is missing"
    assert "not " + "cd" * 32 in str(find_damage(target, "cd" * 32))
    (target / MARKER_NAME).write_text(json.dumps({"format": 0}))
    assert find_damage(target, SOURCE.sha256) == "it has format 0, this fledge writes 1"
    (target / MARKER_NAME).write_text(json.dumps({"format": 1, "sha256": SOURCE.sha256}))
    assert find_damage(target, SOURCE.sha256) == f"{MARKER_NAME} lists no files"
    for text in ("{", "[]"):
        (target / MARKER_NAME).write_text(text)
        assert find_damage(target, SOURCE.sha256) == f"{MARKER_NAME} is missing or unreadable"


def test_unchanged_file_is_hashed_once(tmp_path):
    path, memory, recorder = tmp_path / "f", tmp_path / "hashes", Recorder()
    path.write_bytes(b"abc")
    first = hash_file_once(path, memory, recorder)
    assert first.startswith("ba7816bf")
    assert hash_file_once(path, memory, recorder) == first
    assert recorder.amounts == {"checking f": 3}
    assert recorder.labels == ["checking f"]
    path.write_bytes(b"abcd")
    assert hash_file_once(path, memory, recorder) != first
