"""Times of work on a device, without waiting for it while it runs."""

import time

import torch


class DeviceClock:
    """Seconds between ticks as the device counts them, where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._ticks: list[torch.cuda.Event | float] = []
        self.tick()

    def tick(self) -> None:
        if not self._is_cuda:
            self._ticks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._ticks.append(event)

    def wait(self) -> tuple[float, float]:
        """Until the last tick has passed."""
        first, second, third = self._ticks
        if isinstance(first, float) and isinstance(second, float) and isinstance(third, float):
            return second - first, third - second
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(second, torch.cuda.Event)
        assert isinstance(third, torch.cuda.Event)
        third.synchronize()
        return first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3
