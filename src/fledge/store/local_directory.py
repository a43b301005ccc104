"""A directory that has to be there."""

from pathlib import Path

from fledge.contracts.errors import ArtifactError


def require_directory(path: Path, hint: str = "") -> None:
    """Refuse a path that is no directory; `hint` says behind it what is asked for."""
    if path.is_dir():
        return
    if path.exists():
        raise ArtifactError(f"{path} is a file, and no directory{hint}.")
    raise ArtifactError(f"there is no directory {path}{hint}.")
