"""Prompts of a source that others are to be like: shown to the target before it writes its own."""

import json
from pathlib import Path

from fledge.store.rows import row_files

MOST_CHARS = 2_000
"""Longer prompts are not shown: several are, each time."""

_MOST_EXAMPLES = 10_000
"""As many as memory holds without a thought."""


def read_examples(directory: Path) -> list[str]:
    """What users began with in the first rows of a directory: later turns need what came before."""
    found: list[str] = []
    for path in row_files(directory):
        for line in path.read_bytes().splitlines():
            said = [one["content"] for one in json.loads(line)["messages"] if one["role"] == "user"]
            if said and isinstance(said[0], str) and 0 < len(said[0]) <= MOST_CHARS:
                found.append(said[0])
            if len(found) == _MOST_EXAMPLES:
                return found
    return found
