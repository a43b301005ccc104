"""Where a target runs and in which precision: names a user types, checked against the machine."""

import torch

from fledge.contracts.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = ("auto", *_DTYPES)


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the first CUDA device, or the CPU where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu or install a CUDA build."
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU, and bfloat16 on CUDA (float16 where that is missing)."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if _has_bfloat16(device) else torch.float16
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; use one of {', '.join(DTYPE_NAMES)}.")
    dtype = _DTYPES[name]
    if dtype is torch.bfloat16 and device.type == "cuda" and not _has_bfloat16(device):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{device} ({name}) has no bfloat16; use --dtype float16 or float32, or leave it to "
            "auto."
        )
    return dtype


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in it, which torch's own question does not tell from emulating.

    Cards before Ampere do not; kernels compiled for them know no such numbers.
    """
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8
