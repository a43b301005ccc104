"""A run in a process of its own, so that it can be killed: SOURCE OUT URL."""

import sys
from pathlib import Path

from tests.unit.data.regenerate_support import ask

if __name__ == "__main__":
    source, out, url = sys.argv[1:]
    ask(Path(source), Path(out), url, turns="all")
