"""The SQLite file under a `DuplicateIndex`: hashes of texts, bands, signatures, one position.

    texts       hash                 one per row; the hash is the row's key
    bands       key, row             which rows had this value in one of their bands
    signatures  row, signature       64 bytes per row that has bands

Written through one transaction at a time (write-ahead log), so a killed process leaves what was
last committed. The page cache is capped; memory does not grow with the file.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    FledgeError,
    MismatchError,
)

_CACHE_KIB = 64 * 1024
_LOG_BYTES = 64 << 20
_SET_UP = f"""
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;
    PRAGMA cache_size = -{_CACHE_KIB};
    PRAGMA journal_size_limit = {_LOG_BYTES};
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS texts (hash INTEGER PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS bands (key INTEGER, row INTEGER, PRIMARY KEY (key, row))
        WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS signatures (row INTEGER PRIMARY KEY, signature BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class DuplicateStore:
    """One connection to one file; `traits` say how the file's contents were made."""

    def __init__(self, path: Path, traits: Mapping[str, Any]) -> None:
        self._path = path
        with _translated(path):
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)
            try:
                self._open(traits)
            except BaseException:
                self._connection.close()
                raise

    def _open(self, traits: Mapping[str, Any]) -> None:
        self._connection.executescript(_SET_UP)
        known = self._read_fact("traits")
        if known is not None and known != dict(traits):
            raise MismatchError(
                f"{self._path} was made with {known}, and this run has {dict(traits)}; remove the "
                "file and prepare again from the start."
            )
        self._write_fact("traits", dict(traits))
        self._connection.execute("COMMIT")
        self._connection.execute("BEGIN")
        self.num_rows = int(self._read_fact("num_rows") or 0)
        """Rows added, also those not committed yet."""

    def has_text(self, hashed: int) -> bool:
        with _translated(self._path):
            found = self._connection.execute("SELECT 1 FROM texts WHERE hash = ?", (hashed,))
            return found.fetchone() is not None

    def find_buckets(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Key and row of every row that shares a key."""
        marks = ",".join("?" * len(keys))
        with _translated(self._path):
            found = self._connection.execute(
                f"SELECT key, row FROM bands WHERE key IN ({marks})", keys
            )
            return found.fetchall()

    def read_signature(self, row: int) -> bytes:
        with _translated(self._path):
            found = self._connection.execute(
                "SELECT signature FROM signatures WHERE row = ?", (row,)
            ).fetchone()
        if found is None:
            raise ArtifactError(_damaged(self._path, f"row {row} has no signature"))
        signature: bytes = found[0]
        return signature

    def add(
        self,
        num_rows: int,
        hashes: Iterable[int],
        bands: Iterable[tuple[int, int]],
        signatures: Iterable[tuple[int, bytes]],
    ) -> None:
        """Put new rows into the open transaction; sorted keys touch each page once."""
        run = self._connection.executemany
        with _translated(self._path):
            run("INSERT INTO texts VALUES (?)", [(hashed,) for hashed in sorted(hashes)])
            run("INSERT INTO bands VALUES (?, ?)", sorted(bands))
            run("INSERT INTO signatures VALUES (?, ?)", signatures)
        self.num_rows += num_rows

    def commit(self, position: Mapping[str, Any]) -> None:
        with _translated(self._path):
            self._write_fact("num_rows", self.num_rows)
            self._write_fact("position", dict(position))
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN")

    @property
    def position(self) -> dict[str, Any] | None:
        with _translated(self._path):
            position: dict[str, Any] | None = self._read_fact("position")
        return position

    @property
    def num_bytes(self) -> int:
        """Size of the file once all of the open transaction is in it."""
        with _translated(self._path):
            (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int(pages) * int(page_bytes)

    def close(self) -> None:
        with _translated(self._path):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._connection.close()

    def _read_fact(self, name: str) -> Any:
        found = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,))
        row = found.fetchone()
        try:
            return None if row is None else json.loads(row[0])
        except ValueError as error:
            raise ArtifactError(_damaged(self._path, f"{name} is not JSON")) from error

    def _write_fact(self, name: str, value: Any) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value))
        )


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """SQLite's errors in words a person can act on."""
    try:
        yield
    except sqlite3.Error as error:
        raise _in_words(path, error) from error


def _in_words(path: Path, error: sqlite3.Error) -> FledgeError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ArtifactError(f"another process uses {path}; wait for it, or end it.")
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return CapacityError(
            f"the disk is full, or fails: {path} could not be written ({error}). Free some space "
            "and run again; it goes on from the last commit."
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(f"{path} cannot be opened for writing: {error}.")
    return ArtifactError(_damaged(path, str(error)))


def _damaged(path: Path, what: str) -> str:
    return f"the index of duplicates {path} is damaged ({what}); remove it and prepare again."
