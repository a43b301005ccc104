"""What names say about files: which of a directory are data, and which are lists of prompts."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
LINES_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
DATA_SUFFIXES = (*LINES_SUFFIXES, ".json", ".parquet", TEXT_SUFFIX)
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
"""Files that data sets keep about themselves."""

WILDCARDS = "*?["


def data_suffix(name: str) -> str:
    """The suffix below that of a compression: `.jsonl` of `rows.jsonl.gz`."""
    path = PurePosixPath(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path).suffix


def is_data_file(name: str) -> bool:
    """Whether a file found in a directory is read; a file that is named itself always is."""
    parts = PurePosixPath(name).parts
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    return data_suffix(name) in DATA_SUFFIXES and not is_hidden and parts[-1] not in _DESCRIPTIONS


def has_wildcard(path: str) -> bool:
    return any(character in path for character in WILDCARDS)


def fixed_part(pattern: str) -> str:
    """The directories of a pattern before its first wildcard, with a slash at the end."""
    first = min(pattern.index(character) for character in WILDCARDS if character in pattern)
    return pattern[: pattern.rfind("/", 0, first) + 1]


def matches(name: str, pattern: str) -> bool:
    """As in a shell: `*` stays within a directory, `**` stands for any number of them."""
    return _match_parts(name.split("/"), pattern.split("/"))


def _match_parts(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, rest = patterns[0], patterns[1:]
    if first == "**":
        return any(_match_parts(names[i:], rest) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _match_parts(names[1:], rest)
