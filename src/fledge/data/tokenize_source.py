"""What `fledge tokenize` reads, known before a tokenizer is."""

from pathlib import Path

from fledge.contracts.errors import MismatchError
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.store.manifest import ANSWERS, CONVERSATIONS, Manifest, read_input


def read_source(source: Path, settings: TokenizeSettings) -> Manifest:
    """The manifest of the input, which must be of a kind that can be tokenized."""
    manifest = read_input(source, ANSWERS, CONVERSATIONS)
    if manifest.plan.kind == CONVERSATIONS and not settings.as_recorded:
        raise MismatchError(
            f"{source} holds conversations as they were recorded, not answers of the target. Run "
            "`fledge regenerate` on it first, or take the recorded answers with --as-recorded."
        )
    return manifest
