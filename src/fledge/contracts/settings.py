"""Settings of the engine: frozen, checked when made, never changed afterwards."""

from dataclasses import dataclass, field
from typing import Literal

from fledge.contracts.errors import ConfigError

DEFAULT_HEAD, NO_HEAD = "default", "none"
"""In place of a head's directory: the head that comes with fledge for the target, and no head."""

AcceptRule = Literal["gumbel", "rejection"]
ACCEPT_RULES: tuple[AcceptRule, ...] = ("gumbel", "rejection")
ControllerName = Literal["adaptive", "fixed"]
CONTROLLERS: tuple[ControllerName, ...] = ("adaptive", "fixed")
GraphsChoice = Literal["auto", "on", "off"]
GRAPHS: tuple[GraphsChoice, ...] = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """Shape of the draft tree of one request; a chain is a tree of width 1."""

    depth: int = 6
    """Drafted tokens on the longest path."""

    width: int = 8
    """Children kept per node, and nodes expanded per level."""

    budget: int = 40
    """Drafted nodes that are verified, root not counted."""

    def __post_init__(self) -> None:
        for name, low, high in (("depth", 1, 64), ("width", 1, 64), ("budget", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"tree {name} is {value}; it must be between {low} and {high}.")

    @property
    def num_candidates(self) -> int:
        """Nodes the drafter may score: one level of `width`, then width squared per level."""
        return self.width + (self.depth - 1) * self.width**2

    @property
    def num_nodes(self) -> int:
        """Drafted nodes that reach the verify pass."""
        return min(self.budget, self.num_candidates)

    @property
    def num_scratch(self) -> int:
        """Cache slots a request needs behind its last committed token during a cycle."""
        return max(self.num_nodes, self.width * (self.depth - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine runs; nothing here changes what it answers, except `accept`."""

    tree: TreeSettings = field(default_factory=TreeSettings)
    """Draft tree of each request."""

    accept: AcceptRule = "gumbel"
    """`gumbel`: the text does not depend on the drafts; `rejection`: the field's usual rule."""

    controller: ControllerName = "adaptive"
    """`adaptive`: as much drafting as pays, up to `tree`; `fixed`: `tree` in every cycle."""

    copies: bool = True
    """Draft what followed where the newest tokens stood before, where the head agrees or is unsure;
    chains only."""

    max_requests: int = 32
    """Requests decoded together; further ones wait."""

    max_pass_tokens: int = 2048
    """Tokens of one target pass: decoding requests and their drafts first, prompts in chunks."""

    cache_tokens: int = 0
    """Tokens of cache memory for all requests together; 0 takes what the device can give."""

    share_prefixes: bool = True
    """Reuse the cache entries of tokens that an earlier request began with."""

    block_size: int = 16
    """Tokens per block of cache memory."""

    graphs: GraphsChoice = "auto"
    """Decoding cycles that run ahead of the host, as captured graphs on CUDA: `auto` there and not
    on a CPU, `on` everywhere (uncaptured on a CPU), `off` nowhere."""

    def wants_ahead(self, device_type: str) -> bool:
        """Whether cycles on such a device are to run ahead of the host."""
        return device_type == "cuda" if self.graphs == "auto" else self.graphs == "on"

    def __post_init__(self) -> None:
        if self.accept not in ACCEPT_RULES:
            raise ConfigError(f"accept is {self.accept!r}; it must be one of {ACCEPT_RULES}.")
        if self.controller not in CONTROLLERS:
            raise ConfigError(
                f"controller is {self.controller!r}; it must be one of {CONTROLLERS}."
            )
        if self.graphs not in GRAPHS:
            raise ConfigError(f"graphs is {self.graphs!r}; it must be one of {GRAPHS}.")
        for name in ("max_requests", "max_pass_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.cache_tokens < 0:
            raise ConfigError(
                f"cache_tokens is {self.cache_tokens}; it must be positive, or 0 for what the "
                "device can give."
            )
        if self.max_pass_tokens < self.max_requests:
            raise ConfigError(
                f"max_pass_tokens is {self.max_pass_tokens} and max_requests is "
                f"{self.max_requests}; a pass must hold at least one token of each request."
            )
