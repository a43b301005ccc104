"""config.json and model.safetensors of an export."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fledge.interop.engine_view import CONFIG, WEIGHTS


def write_checkpoint(config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> None:
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    # The writer makes its file private, unlike every other file here.
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode)
