"""What is known of a target without its weights: sizes, and which tokens end its answers."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from transformers import GenerationConfig

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.models.quiet import quiet_transformers
from fledge.models.target_loading import load_config
from fledge.models.tokenizer import TargetTokenizer


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as its config files describe it."""

    tokenizer: TargetTokenizer
    vocab_size: int
    """Rows of its embedding; a tokenizer may know fewer tokens."""

    eos_token_ids: frozenset[int]
    """As transformers' generate would use them; the tokenizer's own where no config names any."""


def read_facts(directory: Path, *, day: date | None = None) -> TargetFacts:
    """Read tokenizer and config files of a target's directory; the weights may be absent.

    `day` is what templates that write today's date get instead of it.
    """
    with quiet_transformers():
        config = load_config(directory).get_text_config()
        tokenizer = TargetTokenizer.load(directory)
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ArtifactError(f"{directory / 'config.json'} does not say its vocab_size.")
    largest = tokenizer.largest_token_id
    if largest >= vocab_size:
        raise MismatchError(
            f"the tokenizer in {directory} has token id {largest}, and the target's vocab_size is "
            f"{vocab_size}; they do not belong together."
        )
    named = (
        _generation_eos(directory),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    found = next((ids for ids in named if ids is not None), None)
    listed = [] if found is None else [found] if isinstance(found, int) else list(found)
    tokenizer = tokenizer if day is None else tokenizer.on_day(day)
    return TargetFacts(tokenizer, vocab_size, frozenset(listed))


def _generation_eos(directory: Path) -> int | list[int] | None:
    try:
        found: int | list[int] | None = GenerationConfig.from_pretrained(
            directory, local_files_only=True
        ).eos_token_id
    except OSError:
        return None  # there is no such file
    return found
