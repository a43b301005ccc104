"""Data sets of the Hugging Face hub: `hf://owner/name`, with `@revision` and `/file` if wanted.

Files are fetched one by one when their turn comes, into huggingface_hub's own cache. The endpoint
is that of HF_ENDPOINT, where it is set.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from fledge.contracts.errors import ArtifactError, ConfigError, FetchError, FledgeError
from fledge.contracts.progress import Progress
from fledge.data.sources.file_names import TEXT_SUFFIX, data_suffix, is_data_file, matches
from fledge.data.sources.places import SourceFile
from fledge.store.capacity import require_disk, translated_disk_errors
from fledge.store.hub_transfers import (
    HUB_TIMEOUT_S,
    first_line,
    folder_bytes,
    shown_growth,
    silent_bars,
)

SCHEME = "hf"
_ADDRESS = re.compile(
    r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<files>.+))?"
)
_HELD_OUT = re.compile(r"(^|[/_.-])(test|valid\w*|dev|eval\w*)([/_.-]|$)")


class _Place(NamedTuple):
    repo: str
    revision: str | None
    files: str | None


def find_hub_files(address: str, progress: Progress) -> list[SourceFile]:
    """The files of a data set that hold its training rows, or those that the address names."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address!r} is no data set; write hf://owner/name.")
    place = _Place(match["repo"], match["revision"], match["files"])
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        info = HfApi(endpoint=endpoint).dataset_info(
            place.repo, revision=place.revision, files_metadata=True, timeout=HUB_TIMEOUT_S
        )
    except Exception as error:
        # Which network errors come through depends on the version of huggingface_hub.
        raise _explain(address, error) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = _choose(sorted(sizes), place, address, progress)
    commit = str(info.sha)
    return [
        SourceFile(
            name=f"hf://{place.repo}@{commit[:12]}/{name}",
            identity=f"{place.repo}@{commit}/{name}",
            size=sizes[name],
            open=partial(_open, place.repo, commit, name, sizes[name], progress),
        )
        for name in names
    ]


def _choose(names: list[str], place: _Place, address: str, progress: Progress) -> list[str]:
    """Named files; else parquet before JSON, and no test split where there is another."""
    if place.files is not None:
        pattern = place.files.rstrip("/")
        below = [name for name in names if name.startswith(f"{pattern}/") and is_data_file(name)]
        chosen = below or [name for name in names if matches(name, pattern)]
        if not chosen:
            raise ArtifactError(
                f"{place.repo} on the Hugging Face hub has no file {pattern!r}; it has "
                f"{', '.join(names[:10]) or 'none'}."
            )
        return chosen
    data = [name for name in names if is_data_file(name) and data_suffix(name) != TEXT_SUFFIX]
    parquet = [name for name in data if data_suffix(name) == ".parquet"]
    data = parquet or data
    if not data:
        raise ArtifactError(
            f"{place.repo} on the Hugging Face hub has no parquet or JSON files; it has "
            f"{', '.join(names[:10]) or 'none'}."
        )
    chosen = [name for name in data if "train" in name]
    chosen = chosen or [name for name in data if not _HELD_OUT.search(name)] or data
    if len(chosen) < len(data):
        progress.note(
            f"{address}: {len(chosen)} of {len(data)} data files are read, from {chosen[0]}; name "
            f"others as {address.rstrip('/')}/FILE"
        )
    return chosen


def _open(repo: str, commit: str, name: str, size: int, progress: Progress) -> BinaryIO:
    address = f"hf://{repo}/{name}"
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / f"datasets--{repo.replace('/', '--')}" / "blobs"
    fetch = partial(
        hf_hub_download,
        repo,
        name,
        repo_type="dataset",
        revision=commit,
        endpoint=os.environ.get("HF_ENDPOINT"),
        cache_dir=cache,
        etag_timeout=HUB_TIMEOUT_S,
    )
    try:
        with translated_disk_errors(cache), silent_bars():
            before = folder_bytes(blobs)
            known = cache / f"datasets--{repo.replace('/', '--')}" / "snapshots" / commit / name
            if known.exists():
                return known.open("rb")
            require_disk(cache, size, address)
            with shown_growth(f"downloading {address}", size, blobs, progress, since=before):
                return Path(fetch()).open("rb")
    except FledgeError:
        raise
    except Exception as error:
        raise _explain(address, error) from error


def _explain(address: str, error: Exception) -> FetchError:
    if isinstance(error, GatedRepoError):
        return FetchError(
            f"{address} is gated on the Hugging Face hub: accept its terms on its page and log in "
            "with `hf auth login`."
        )
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return FetchError(
            f"there is no data set {address} on the Hugging Face hub, or it is private. Check the "
            "spelling."
        )
    return FetchError(
        f"{address} could not be fetched from the Hugging Face hub: {first_line(error)}. Check the "
        "network, or fetch the data set elsewhere and give its directory."
    )
