"""Reading counters from the device without waiting for it."""

import torch
from torch import Tensor


class Readout:
    """Hands over what a counter has gathered, and sets it back to zero.

    On CUDA `take` starts a copy and returns the one it started the time before, which has long
    arrived; the first time there is none. On the CPU it returns at once.
    """

    def __init__(self, counter: Tensor) -> None:
        self._counter = counter
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def take(self) -> Tensor | None:
        if not self._counter.is_cuda:
            taken = self._counter.clone()
            self._counter.zero_()
            return taken
        copy = torch.empty(self._counter.shape, dtype=self._counter.dtype, pin_memory=True)
        copy.copy_(self._counter, non_blocking=True)
        self._counter.zero_()
        event = torch.cuda.current_stream(self._counter.device).record_event()
        earlier, self._pending = self._pending, (copy, event)
        if earlier is None:
            return None
        earlier[1].synchronize()
        return earlier[0]
