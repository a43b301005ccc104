"""What tuning found best for a head, for engines that cannot measure it themselves."""

from dataclasses import dataclass

from fledge.contracts.errors import ConfigError
from fledge.contracts.settings import TreeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """The tree that was fastest, and the chain that was."""

    tree: TreeSettings
    chain_depth: int | None = None
    """Best length of a chain, for engines without trees; None takes the depth of the tree."""

    def __post_init__(self) -> None:
        if self.chain_depth is not None and not 1 <= self.chain_depth <= 64:
            raise ConfigError(
                f"chain_depth is {self.chain_depth}; it must be between 1 and 64 drafted tokens."
            )

    @property
    def chain(self) -> int:
        """Drafted tokens of a chain, root not counted."""
        return self.chain_depth or self.tree.depth
