"""Where each channel of the tapped layers lies and how far it spreads: features are coded in units
of it, so that a channel a thousand times larger than its neighbours does not drown them.

    center  [N] float32   a middle value of the channel
    spread  [N] float32   above zero: how far values usually are from it

Both are stored under these names in one safetensors file. They are measured once for a directory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fledge.contracts.errors import ArtifactError

CHANNELS_NAME = "channels.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """One number each for every value of a row."""

    center: NDArray[np.float32]
    spread: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.center)

    def encode(self) -> bytes:
        return bytes(save({"center": self.center, "spread": self.spread}))

    @classmethod
    def decode(cls, content: bytes, file: str, width: int) -> "Channels":
        """Refuses what rows of `width` values cannot have been coded with."""
        try:
            tensors = load(content)
            center, spread = (tensors[name].astype(np.float32) for name in ("center", "spread"))
        except (SafetensorError, KeyError) as error:
            raise ArtifactError(
                f"{file} does not hold the channels of features ({error}); capture again."
            ) from error
        if center.shape != (width,) or spread.shape != (width,):
            raise ArtifactError(
                f"{file} holds channels of shapes {center.shape} and {spread.shape}, and rows of "
                f"features have {width} values; capture again."
            )
        if not (np.isfinite(center).all() and np.isfinite(spread).all() and (spread > 0).all()):
            raise ArtifactError(f"{file} holds channels without a usable spread; capture again.")
        return cls(center, spread)
