"""Where the user's cache is and how it is laid out; nothing here reads or writes a file.

<cache>/targets/<key>/          directories transformers can load, each published by one rename
<cache>/downloads/<key>/        packages on their way to becoming a target; gone once it is there
<cache>/exports/<key>/          heads, and GGUF targets, as another engine reads them
<cache>/locks/<key>.lock        held while a target is made
<cache>/hashes/<id>.json        sha256 of local files that were hashed before
<cache>/pass_times/<id>.json    how long passes of a target took on this machine
<cache>/native/<id>.so          kernels compiled for this processor
<cache>/batches/<name>/         files and batches of a server
"""

import os
from dataclasses import dataclass
from pathlib import Path


def default_cache_dir() -> Path:
    """`$FLEDGE_CACHE`, else `$XDG_CACHE_HOME/fledge`, else `~/.cache/fledge`."""
    if own := os.environ.get("FLEDGE_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "fledge"
    return Path.home() / ".cache" / "fledge"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Paths inside one cache directory."""

    root: Path

    def target(self, key: str) -> Path:
        return self.root / "targets" / key

    def downloads(self, key: str) -> Path:
        return self.root / "downloads" / key

    def export(self, key: str) -> Path:
        return self.root / "exports" / key

    def lock(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"

    @property
    def hashes(self) -> Path:
        return self.root / "hashes"

    @property
    def pass_times(self) -> Path:
        return self.root / "pass_times"

    @property
    def native(self) -> Path:
        return self.root / "native"

    @property
    def batches(self) -> Path:
        return self.root / "batches"
