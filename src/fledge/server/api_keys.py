"""Who may ask: keys from a file, read again when it changes, and from the environment."""

import hashlib
import hmac
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.errors import ConfigError

_log = logging.getLogger(__name__)

KEYS_VARIABLE = "FLEDGE_API_KEYS"
"""Keys of the environment, separated by commas."""

_CHECK_S = 1.0
"""The file is looked at again at most so often."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever holds a key, called by the beginning of its hash."""

    name: str
    owner: str = "anyone"
    """Whose files these are: long enough to be nobody else's, and of no use as a key."""


ANYONE = Caller("anyone")


class ApiKeys:
    """The keys that count now."""

    def __init__(self, file: Path | None, variable: str | None = None) -> None:
        self._file = file
        given = os.environ.get(KEYS_VARIABLE, "") if variable is None else variable
        self._fixed = _digests(given.replace(",", "\n"))
        self._digests = self._fixed
        self._stamp: tuple[int, int, int] | None = None
        self._checked = time.monotonic()
        if file is not None:
            self._stamp = self._read(file)
            if not self._digests:
                raise ConfigError(f"{file} holds no API key; write one a line, or do without.")

    @property
    def are_needed(self) -> bool:
        return self._file is not None or bool(self._fixed)

    def find(self, key: str) -> Caller | None:
        """Who holds this key; None when nobody does. All keys are compared, in constant time."""
        self._refresh()
        digest = hashlib.sha256(key.encode()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if not found:
            return None
        owner = hashlib.sha256(b"owner of files: " + digest).hexdigest()[:32]
        return Caller(digest.hex()[:8], owner)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked < _CHECK_S:
            return
        self._checked = now
        try:
            if _stamp(self._file) != self._stamp:
                self._stamp = self._read(self._file)
                _log.info("%d API keys are known now", len(self._digests))
        except (ConfigError, OSError) as error:
            _log.warning("the API keys stay as they are: %s", error)

    def _read(self, file: Path) -> tuple[int, int, int]:
        try:
            stamp = _stamp(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys in {file} cannot be read: {error}.") from error
        self._digests = self._fixed | _digests(text)
        return stamp


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _digests(text: str) -> frozenset[bytes]:
    """Hashes of the keys, one a line; empty lines and those that begin with # are none."""
    lines = [line.strip() for line in text.splitlines()]
    return frozenset(
        hashlib.sha256(line.encode()).digest()
        for line in lines
        if line and not line.startswith("#")
    )
