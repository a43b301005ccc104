"""Where chains that a head drafted give way to copies, in every kind of cycle but those on lists.

Cycles of the ordinary kind ask the host what requests have said. Those that run ahead of it ask the
device, where tokens lie beside the features that a head reads.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from fledge.contracts.settings import EngineSettings
from fledge.engine.calibration import Calibration
from fledge.engine.sequence import Sequence
from fledge.ops.copies import CopiedChains, Copies, Text, copy_chains, prefer_copies
from fledge.ops.staging import send
from fledge.ops.tree import Candidates

Copier = Callable[[Candidates], CopiedChains]
"""Makes copies of some of the chains that a head has drafted."""


class CopiedDrafts:
    """Copies for the chains of one head."""

    def __init__(
        self, calibration: Calibration, settings: EngineSettings, device: torch.device
    ) -> None:
        self._calibration, self._is_on = calibration, settings.copies
        self.keeps_tokens = settings.copies and settings.wants_ahead(device.type)
        """Whether tokens lie on the device beside their features."""

    def of_host(
        self, sequences: Many[Sequence], sampled_B: Tensor, *, depth: int, width: int
    ) -> Copier | None:
        """Of texts that the host knows; None where there is nothing to copy."""
        if not self._is_on or width > 1:
            return None
        found = [seq.find_copy(depth) for seq in sequences]
        if not any(found):
            return None
        nothing = [0] * (1 + depth)
        lines = [nothing if one is None else [one.match_len, *one.token_ids] for one in found]
        sent_BX = send(lines, sampled_B.device)
        copies = Copies(sent_BX[:, 0], sent_BX[:, 1:])
        return lambda chains: prefer_copies(chains, copies, sampled_B, self._calibration.depth_maps)

    def of_device(
        self, text: Text, sampled_B: Tensor, is_drafted_B: Tensor, *, width: int
    ) -> Copier | None:
        """Of texts that only the device knows, and only of requests that are drafted for."""
        if not self.keeps_tokens or width > 1:
            return None
        # Of others it may never have been told the tokens: what lies there may be none.
        text = text._replace(lens_B=torch.where(is_drafted_B, text.lens_B, 1))
        return lambda chains: copy_chains(chains, text, sampled_B, self._calibration.depth_maps)
