"""Engines that others wrote and that fledge can run with an exported head."""

from typing import Literal

OutsideEngine = Literal["vllm", "sglang", "llamacpp", "openvino"]
"""All of them; OpenVINO only where exports are tested."""

ServingEngine = Literal["fledge", "vllm", "sglang", "llamacpp"]
"""What `--engine` takes."""
