"""Directories wherever they are: the same promises on a disk, in S3, at Google and in Azure."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError, MismatchError
from fledge.store import object_place
from fledge.store.local_place import LocalPlace
from fledge.store.manifest import Plan
from fledge.store.object_place import ObjectPlace
from fledge.store.place import LOCK_NAME, Place
from fledge.store.places import open_place
from fledge.store.stage_directory import PLAN_NAME, open_stage_at
from tests.unit.store.object_servers import Cloud

PLAN = Plan(kind="features", settings={"rows": 3})


@pytest.fixture
def objects(cloud: Cloud, request: pytest.FixtureRequest) -> ObjectPlace:
    place = open_place(f"{cloud.root}/some/{request.node.name.partition('[')[0]}/")
    assert isinstance(place, ObjectPlace)
    return place


def check_promises(place: Place) -> None:
    assert place.names() == set()
    assert place.sizes() == {}
    assert place.read("a") is None
    with place.locked():
        assert place.create("b", [b"123", memoryview(b"4567")])
        assert not place.create("b", [b"other"])
        assert place.read("b") == b"1234567"
        place.replace("a", b"first")
        place.replace("a", b"second")
        assert place.names() >= {"a", "b"}
        assert {name: place.sizes()[name] for name in ("a", "b")} == {"a": 6, "b": 7}
    assert place.read_range("b", 2, 4).tobytes() == b"3456"
    assert len(place.read_range("b", 2, 0)) == 0
    with pytest.raises(ArtifactError, match=r"/b ends at byte 7, and bytes up to 9 belong to it"):
        place.read_range("b", 5, 4)
    one, other = memoryview(bytearray(1)), memoryview(bytearray(4))
    place.read_into("b", 1, [one, other])
    assert bytes(one) + bytes(other) == b"23456"
    with pytest.raises(ArtifactError, match=r"/b ends at byte 7, and bytes up to 9 belong to it"):
        place.read_into("b", 4, [one, other])
    with pytest.raises(ArtifactError, match=r"/nothing is not there \(any more\)"):
        place.read_range("nothing", 0, 4)
    place.remove("a")
    place.remove("a")
    assert "a" not in place.names()


def test_a_local_directory(tmp_path: Path) -> None:
    check_promises(open_place(tmp_path / "new"))


def test_objects(objects: ObjectPlace, cloud: Cloud) -> None:
    check_promises(objects)
    # Neighbours whose names begin alike, and what lies deeper, belong to somebody else.
    open_place(f"{objects}-more").replace("x", b"1")
    open_place(f"{objects}/deeper").replace("y", b"1")
    assert objects.names() == {"b", "deeper"}
    assert set(objects.sizes()) == {"b"}
    assert "some" in open_place(cloud.root).names()


def test_large_objects_go_in_parts(objects: ObjectPlace, monkeypatch) -> None:
    monkeypatch.setattr(object_place, "_WHOLE_BYTES", 1000)
    if str(objects).startswith("gs"):
        pytest.skip("the emulator knows no uploads in parts")
    chunks = [bytes([i]) * (3 << 20) for i in range(7)]
    assert objects.create("large", chunks)
    assert not objects.create("large", chunks)
    assert objects.sizes() == {"large": 21 << 20}
    assert objects.read("large") == b"".join(chunks)


def test_requests_that_fail_are_made_again(objects: ObjectPlace, cloud: Cloud) -> None:
    """A third of them: error answers, connections that end before, after and within."""
    cloud.gateway.share = 0.35
    with objects.locked():
        for number in range(8):
            content = os.urandom(50_000)
            name = f"file-{number}"
            # False where the answer to a first try was lost.
            objects.create(name, [content])
            assert objects.read(name) == content
            assert objects.read_range(name, 100, 40_000).tobytes() == content[100:40_100]
            objects.replace("last", content)
    assert set(objects.sizes()) == {*(f"file-{number}" for number in range(8)), "last"}
    cloud.gateway.share = 0
    assert LOCK_NAME not in objects.names()
    faults = {fault for _, _, fault in cloud.gateway.seen}
    assert faults == {"", "500", "503", "reset", "lost", "torn"}


def test_a_store_that_never_answers(cloud: Cloud, monkeypatch) -> None:
    monkeypatch.setattr(object_place, "_MAX_TRIES", 2)
    for name in cloud.environment:
        if "URL" in name or "ENDPOINT" in name:
            monkeypatch.setenv(name, "http://127.0.0.1:9")
    if cloud.root.startswith("gs"):
        key = json.loads(cloud.environment["GOOGLE_SERVICE_ACCOUNT_KEY"])
        key["gcs_base_url"] = "http://127.0.0.1:9"
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setitem(object_place_retries(), "max_retries", 1)
    place = open_place(f"{cloud.root}/x")
    with pytest.raises(FetchError, match=r"/x/a cannot be written: .*Check the address, the netw"):
        place.replace("a", b"1")
    with pytest.raises(FetchError, match=r"/x/a cannot be read: "):
        place.read("a")


def object_place_retries() -> dict[str, object]:
    from fledge.store import object_store

    return object_store._RETRIES


# Stages in object stores


def test_a_stage_in_an_object_store(objects: ObjectPlace) -> None:
    with open_stage_at(objects, PLAN) as stage:
        assert not stage.is_finished
        stage.place.create("part", [b"half"])
    with open_stage_at(objects, PLAN) as stage:
        assert not stage.is_finished
        assert stage.place.read("part") == b"half"
    other = Plan(kind="features", settings={"rows": 4})
    with pytest.raises(
        MismatchError,
        match=r"holds unfinished work with settings.rows = 3, and this run has settings.rows = 4",
    ):
        open_stage_at(objects, other).__enter__()
    with open_stage_at(objects, PLAN) as stage:
        stage.seal(counts={"n": 1}, files={"part": {"bytes": 4, "sha256": "x"}}, device="cpu")
    with open_stage_at(objects, PLAN) as stage:
        assert stage.is_finished
        assert stage.manifest.counts == {"n": 1}
    with pytest.raises(MismatchError, match=r"holds finished work with settings.rows = 3"):
        open_stage_at(objects, other).__enter__()
    objects.remove("part")
    with pytest.raises(ArtifactError, match=r"/part is missing, and the manifest says 4 bytes"):
        open_stage_at(objects, PLAN).__enter__()
    assert LOCK_NAME not in objects.names()


def test_strangers_objects_are_left_alone(objects: ObjectPlace) -> None:
    objects.replace("thesis.tex", b"1")
    with pytest.raises(ConfigError, match=r"not made by fledge \(it holds thesis.tex\)"):
        open_stage_at(objects, PLAN).__enter__()
    assert objects.names() == {"thesis.tex"}


def test_a_second_writer_is_refused(objects: ObjectPlace) -> None:
    with open_stage_at(objects, PLAN):
        with pytest.raises(
            ArtifactError,
            match=rf"another fledge process is writing {objects}: process {os.getpid()} on .*, "
            rf"since 20.*if that process is no more, remove {objects}/.lock and run again",
        ):
            open_stage_at(objects, PLAN).__enter__()
        assert LOCK_NAME in objects.names()
    with open_stage_at(objects, PLAN):
        pass


def test_writers_at_once_get_one_lock(objects: ObjectPlace) -> None:
    inside, outcomes = threading.Barrier(6), []

    def write() -> None:
        inside.wait()
        try:
            with objects.locked():
                outcomes.append("held")
                inside.wait()
        except ArtifactError:
            outcomes.append("refused")
            inside.wait()

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", *["refused"] * 5]


KILLED = """
import os, signal, sys
from fledge.store.manifest import Plan
from fledge.store.places import open_place
from fledge.store.stage_directory import open_stage_at
with open_stage_at(open_place(sys.argv[1]), Plan(kind="features", settings={"rows": 3})):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lock_of_a_dead_process_is_taken_over(objects: ObjectPlace, cloud: Cloud) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED, str(objects)],
        env={**os.environ, **cloud.environment},
        check=False,
    )
    assert objects.names() == {LOCK_NAME, PLAN_NAME}
    with open_stage_at(objects, PLAN):
        holder = json.loads(objects.read(LOCK_NAME) or b"")
        assert holder["process"] == os.getpid()
    assert LOCK_NAME not in objects.names()


@pytest.mark.parametrize("content", [b"not json", b"[1]", b'{"host": "far", "process": 7}'])
def test_locks_that_only_the_user_can_judge(objects: ObjectPlace, content: bytes) -> None:
    objects.replace(LOCK_NAME, content)
    with pytest.raises(ArtifactError, match=r"if that process is no more, remove .*/\.lock"):
        open_stage_at(objects, PLAN).__enter__()
    assert objects.read(LOCK_NAME) == content
    objects.remove(LOCK_NAME)


def test_a_lock_that_changes_hands_meanwhile(objects: ObjectPlace, monkeypatch) -> None:
    with objects.locked():
        dead = json.loads(objects.read(LOCK_NAME) or b"")
    dead["started"] = "-1"
    objects.replace(LOCK_NAME, json.dumps(dead).encode())
    found = objects.read_version(LOCK_NAME)
    assert found is not None
    objects.replace(LOCK_NAME, json.dumps({**dead, "nonce": "newer"}).encode())
    for stale in (found, None):
        with monkeypatch.context() as patch:
            patch.setattr(objects, "read_version", lambda name, stale=stale: stale)
            with pytest.raises(ArtifactError, match="just begun or ended writing .*; run again"):
                objects.locked().__enter__()
    with objects.locked():
        pass


def test_places_by_address(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = open_place("~/deep/out")
    assert isinstance(place, LocalPlace)
    assert place.path == tmp_path / "deep" / "out"
    with pytest.raises(ConfigError, match=r"unknown scheme; use a local path or one of s3://, gs:"):
        open_place("ftp://x")
    for address in ("s3://", "s3:///x"):
        with pytest.raises(ConfigError, match=r"names no bucket; write s3://bucket/name"):
            open_place(address)
    for path in ("az://container/x", Path("az://container/x")):
        with pytest.raises(FetchError, match=r"az://container/x cannot be read: .*[Aa]ccount"):
            open_place(path)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"s3://b/x needs obstore: pip install 'fledge\[cloud\]'"):
        open_place("s3://b/x")


def test_local_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    place = LocalPlace(tmp_path)
    with pytest.raises(ArtifactError, match=r"folder cannot be read: Is a directory"):
        place.read("folder")
    with pytest.raises(ArtifactError, match=r"folder cannot be read: Is a directory"):
        place.read_range("folder", 0, 3)
