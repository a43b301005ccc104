"""Files of a Hugging Face model id, from huggingface_hub's local cache or from the network.

huggingface_hub keeps its own cache, safe between processes and after interruptions; it is used as
it is, so a model fetched by another program is not fetched again.
"""

from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from fledge.contracts.errors import ArtifactError, FetchError, FledgeError
from fledge.contracts.progress import Progress
from fledge.models.hf_directory import check_directory
from fledge.store.capacity import FULL_ERRNOS, require_disk, translated_disk_errors
from fledge.store.hub_transfers import (
    HUB_TIMEOUT_S,
    first_line,
    folder_bytes,
    shown_growth,
    silent_bars,
)

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights

_HEAD_FILES = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
]

_REMEDY = "Check the spelling and the network, or give a local directory or a GGUF file."


def fetch_from_hub(name: str, progress: Progress) -> Path:
    """The directory of a model id with config, safetensors weights and tokenizer."""
    cached = _find_cached(name)
    if cached is not None:
        return cached
    cache = Path(constants.HF_HUB_CACHE)
    try:
        with translated_disk_errors(cache), silent_bars():
            directory = _download(name, cache, progress)
    except FledgeError:
        raise
    except Exception as error:
        # Which network errors come through depends on the version of huggingface_hub.
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            raise
        raise _explain(name, error) from error
    check_directory(directory)
    return directory


def fetch_head_from_hub(name: str, progress: Progress) -> Path:
    """The directory of a head's id with its config and weights, pickled ones too."""
    cached = _find_cached_head(name)
    if cached is not None:
        return cached
    progress.note(f"fetching the head {name} from the Hugging Face hub")
    cache = Path(constants.HF_HUB_CACHE)
    try:
        with translated_disk_errors(cache), silent_bars():
            return Path(
                snapshot_download(name, allow_patterns=_HEAD_FILES, etag_timeout=HUB_TIMEOUT_S)
            )
    except FledgeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            raise
        raise _explain(name, error) from error


def _find_cached_head(name: str) -> Path | None:
    """A whole head in huggingface_hub's cache; an interrupted download is none."""
    try:
        directory = Path(snapshot_download(name, local_files_only=True, allow_patterns=_HEAD_FILES))
    except LocalEntryNotFoundError:
        return None
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return directory if files and (directory / "config.json").is_file() else None


def _find_cached(name: str) -> Path | None:
    try:
        directory = Path(snapshot_download(name, local_files_only=True))
        check_directory(directory)
    except (LocalEntryNotFoundError, ArtifactError):
        return None  # not there, or only some of its files
    return directory


def _download(name: str, cache: Path, progress: Progress) -> Path:
    info = HfApi().model_info(name, files_metadata=True, timeout=HUB_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = set(filter_repo_objects(sizes, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    if not any(file.endswith(".safetensors") for file in names):
        raise FetchError(
            f"{name} on the Hugging Face hub has no safetensors weights at its top level. Choose a "
            "repository that has, or give a local directory or a GGUF file."
        )
    total = sum(sizes[file] for file in names)
    blobs = cache / f"models--{name.replace('/', '--')}" / "blobs"
    require_disk(cache, total - folder_bytes(blobs), name)
    with shown_growth(f"downloading {name}", total, blobs, progress):
        return Path(
            snapshot_download(
                name,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                etag_timeout=HUB_TIMEOUT_S,
            )
        )


def _explain(name: str, error: Exception) -> FetchError:
    if isinstance(error, GatedRepoError):
        return FetchError(
            f"{name} is gated on the Hugging Face hub: accept its terms on its page and log in "
            "with `hf auth login`, or give a local directory or a GGUF file."
        )
    if isinstance(error, RepositoryNotFoundError):
        return FetchError(
            f"there is no model {name!r} on the Hugging Face hub (or it is private), and no such "
            f"local directory. {_REMEDY}"
        )
    return FetchError(
        f"{name!r} is not a local directory, and could not be fetched from the Hugging Face hub: "
        f"{first_line(error)}. {_REMEDY}"
    )
