"""An export for OpenVINO turned into what OpenVINO GenAI runs, by the user's own optimum-intel."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fledge.contracts.errors import EngineError
from fledge.interop.engines.installation import InstalledEngine
from fledge.interop.openvino_export import LAYERS

_MODEL = "openvino_model.xml"
_MODE = re.compile(r"<eagle3_mode [^>]*>")


def convert_models(engine: InstalledEngine, places: Mapping[Path, Path]) -> None:
    """Turn models into OpenVINO's format: from each directory into the one it is mapped to."""
    script = Path(__file__).with_name("openvino_converter.py")
    words = [str(word) for pair in places.items() for word in pair]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if engine.python != Path(sys.executable):
        environment.pop("PYTHONPATH", None)
    process = subprocess.run(
        [str(engine.python), str(script), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["it said nothing"]
        raise EngineError(f"optimum-intel could not convert the models: {lines[-1]}")


def name_layers(export: Path, converted: Path) -> None:
    """Put the layers of an export into the converted head, where optimum-intel leaves them out."""
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    layers = " ".join(str(layer) for layer in config[LAYERS])
    file = converted / _MODEL
    text = file.read_text(encoding="utf-8")
    named, times = _MODE.subn(rf'\g<0><{LAYERS} value="{layers}" />', text)
    if times != 1:
        raise EngineError(
            f"{file} is not marked as an EAGLE-3 head; optimum-intel is older or newer than the "
            "one fledge knows."
        )
    file.write_text(named, encoding="utf-8")
