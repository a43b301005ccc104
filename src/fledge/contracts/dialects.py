"""Formats in which a head can leave fledge."""

from typing import Literal

Dialect = Literal["vllm", "sglang", "speculators", "eagle", "gguf", "openvino"]
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang", "speculators", "eagle", "gguf", "openvino")
