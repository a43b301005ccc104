"""Settings of `fledge serve`: where it listens, who may ask, and how much."""

from dataclasses import dataclass, field

from fledge.contracts.batch_settings import BatchSettings
from fledge.contracts.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How the server meets its clients; nothing here changes an answer."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is seen by this machine only."""

    port: int = 8000
    """0 takes any free port."""

    model_names: tuple[str, ...] = ()
    """Names under which clients ask for the target; without any, the target's own."""

    api_keys_file: str | None = None
    """One key a line; read again when the file changes."""

    max_body_bytes: int = 4 * _MIB
    """Largest body of a request."""

    max_prompt_tokens: int = 0
    """Longest prompt; 0 allows what the target's context holds."""

    max_answer_tokens: int = 0
    """Longest answer a client may ask for; 0 allows what the target's context holds."""

    max_choices: int = 16
    """Answers one request may ask for: its prompts times `n`."""

    max_queue: int = 256
    """Answers that may wait while the engine is full; further ones are sent away with 429."""

    request_timeout_s: float = 600.0
    """Seconds from the arrival of a request to the end of its answer."""

    client_timeout_s: float = 30.0
    """Seconds a client may take to send its request, or to take what it was sent."""

    drain_s: float = 30.0
    """Seconds that running requests have after SIGTERM."""

    stall_s: float = 300.0
    """An engine that is not heard of for so many seconds is ended and started again."""

    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask; none unless told otherwise."""

    log_prompts: bool = False
    """Write prompts and answers into the log."""

    batches: BatchSettings = field(default_factory=BatchSettings)
    """Files of requests that are answered when there is time."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.")
        for name in ("max_body_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("max_prompt_tokens", "max_answer_tokens", "max_queue"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or positive.")
        for name in ("request_timeout_s", "client_timeout_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive.")
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s is {self.drain_s}; it must be 0 or positive.")
        if any(not name.strip() for name in self.model_names):
            raise ConfigError("a model name is empty; name at least one letter.")
