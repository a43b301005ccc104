"""Formats in which a head can leave fledge."""

from typing import Literal

from fledge.contracts.outside_engines import OutsideEngine

Dialect = Literal["vllm", "sglang", "speculators", "eagle", "gguf", "openvino"]
HeadPrecision = Literal["q8_0", "q4_0"]
"""Block formats that a GGUF head can be rounded to, 8 or 4 bits a weight."""

PRECISIONS: tuple[HeadPrecision, ...] = ("q8_0", "q4_0")
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang", "speculators", "eagle", "gguf", "openvino")

ENGINE_OF: dict[Dialect, OutsideEngine] = {
    "vllm": "vllm",
    "speculators": "vllm",
    "sglang": "sglang",
    "gguf": "llamacpp",
    "openvino": "openvino",
}
"""Formats whose engine can be run on an export; EAGLE's own code is no package."""
