"""Heads and targets that the tests of formats share."""

from pathlib import Path
from typing import Any

from fledge.models.head_files import save_head
from fledge.models.target import Target
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model

NUM_LAYERS = 8
DEFAULT_TAPS = (2, 4, 5)
IDS = "eagle_aux_hidden_state_layer_ids"

TARGET: Target = target_of(tiny_model("llama", num_hidden_layers=NUM_LAYERS))


def write_head(directory: Path, **flags: Any) -> Path:
    """A tiny head of our own format."""
    save_head(tiny_head(TARGET, **flags), directory)
    return directory


def write_target(directory: Path, architecture: str = "llama", **options: Any) -> Path:
    """A tiny target of the head's sizes, with its tokenizer."""
    return save_tiny_target(directory, architecture, num_hidden_layers=NUM_LAYERS, **options)
