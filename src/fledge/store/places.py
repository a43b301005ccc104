"""From what a user writes to a directory of files: a local path, or an address."""

import re
from pathlib import Path

from fledge.contracts.errors import ConfigError
from fledge.store.local_place import LocalPlace
from fledge.store.object_place import ObjectPlace
from fledge.store.object_store import SCHEMES, is_object_address
from fledge.store.place import Place


def open_place(address: str | Path) -> Place:
    """A local directory, which need not exist yet, or a prefix of an object store."""
    # A `Path` of an address has lost one of its slashes.
    text = re.sub(rf"^({'|'.join(SCHEMES)}):/(?!/)", r"\1://", str(address))
    if is_object_address(text):
        return ObjectPlace(text)
    if "://" in text:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{text!r} has an unknown scheme; use a local path or one of {known}.")
    try:
        return LocalPlace(Path(address).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"{text!r} names the home of nobody here; write the path out.") from error
