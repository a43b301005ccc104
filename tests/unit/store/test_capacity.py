"""Room on the disk and in memory, told in plain words."""

import errno

import pytest

from fledge.contracts.errors import CapacityError, ConfigError
from fledge.store.capacity import (
    format_bytes,
    require_disk,
    require_memory,
    translated_disk_errors,
)


def raise_inside(error: OSError, path, needed=None) -> None:
    with translated_disk_errors(path, needed):
        raise error


def test_sizes_for_people():
    shown = [format_bytes(size) for size in (0, 999, 1500, 538_090_408, 7 * 10**9, 2 * 10**12)]
    assert shown == ["0 bytes", "999 bytes", "1.5 kB", "538.1 MB", "7.0 GB", "2.0 TB"]


def test_too_little_disk_names_needed_and_free(tmp_path):
    require_disk(tmp_path, 1, "tiny")
    place = tmp_path / "not" / "yet"
    with pytest.raises(
        CapacityError, match=r"for tiny in .*not/yet: about 1000.0 TB needed, .*free"
    ):
        require_disk(place, 10**15, "tiny")


def test_too_little_memory_names_needed_and_available():
    require_memory(1, "tiny")
    with pytest.raises(
        CapacityError, match=r"memory for tiny: about 1000.0 TB needed, .*available"
    ):
        require_memory(10**15, "tiny")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_is_a_capacity_error(tmp_path, code):
    error = OSError(code, "full up", "model.safetensors")
    with pytest.raises(
        CapacityError, match=r"full up: model.safetensors \(about 2.0 GB needed in all, .* free"
    ):
        raise_inside(error, tmp_path, 2 * 10**9)
    with pytest.raises(CapacityError, match=r"full up \(.* free\). Free some space"):
        raise_inside(OSError(code, "full up"), tmp_path)


def test_forbidden_cache_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot write to the cache directory.*FLEDGE_CACHE"),
        translated_disk_errors(tmp_path),
    ):
        (tmp_path / "file" / "locks").mkdir(parents=True)


def test_an_output_directory_is_not_the_cache(tmp_path):
    with pytest.raises(CapacityError, match="choose an output directory on a larger disk"):
        require_disk(tmp_path, 10**15, "rows", place="output")
    with (
        pytest.raises(CapacityError, match="run the same command again: it goes on where it"),
        translated_disk_errors(tmp_path, place="output"),
    ):
        raise OSError(errno.ENOSPC, "full up")
    with (
        pytest.raises(ConfigError, match=r"cannot write to /.*: no\. Choose a directory you may"),
        translated_disk_errors(tmp_path, place="output"),
    ):
        raise OSError(errno.EACCES, "no")


def test_other_errors_pass(tmp_path):
    with pytest.raises(OSError, match="broken"):
        raise_inside(OSError(errno.EIO, "broken"), tmp_path)
