"""Settings of the server's batches: where files are kept, how many, how large, how long."""

from dataclasses import dataclass

from fledge.contracts.errors import ConfigError

_COUNTS = ("max_file_bytes", "max_lines", "max_files", "max_total_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What clients may hand in as files, and what is kept of it."""

    directory: str | None = None
    """Where files and batches are kept; without one, below the cache by the model's name."""

    concurrency: int = 0
    """Lines answered at the same time; 0 is as many answers as the engine makes at once."""

    max_file_bytes: int = 200_000_000
    """Largest file that may be uploaded."""

    max_lines: int = 50_000
    """Requests that one batch may hold."""

    max_files: int = 1000
    """Files that are kept, results included, and batches that are remembered."""

    max_total_bytes: int = 20_000_000_000
    """All kept files together; when they are more, nothing is uploaded."""

    keep_days: float = 30.0
    """Files and batches that are over are removed after so long."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.concurrency < 0:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be 0 or positive.")
        if not self.keep_days > 0:
            raise ConfigError(f"keep_days is {self.keep_days}; it must be positive.")
