"""Shapes of draft tree that a tuning can try: a lattice of depths, widths and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from fledge.contracts.settings import ControllerName, TreeSettings
from fledge.contracts.tune_settings import TuneSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tree, and who decides how much of it is drafted."""

    depth: int
    width: int
    budget: int
    controller: ControllerName

    @property
    def name(self) -> str:
        """Under which measurements speak of it."""
        return f"depth {self.depth}, width {self.width}, budget {self.budget}, {self.controller}"

    @property
    def tree(self) -> TreeSettings:
        return TreeSettings(depth=self.depth, width=self.width, budget=self.budget)

    @property
    def is_chain(self) -> bool:
        return self.width == 1


class Lattice:
    """All shapes of the settings, each once: a budget beyond a tree's nodes changes nothing."""

    def __init__(self, settings: TuneSettings) -> None:
        self._depths, self._widths = settings.depths, settings.widths
        self._budgets, self._controller = settings.budgets, settings.controllers[0]

    def all(self) -> list[Shape]:
        return self._made(self._depths, self._widths, self._budgets)

    def coarse(self) -> list[Shape]:
        """Every second value of each, and the last."""
        return self._made(*map(_every_second, (self._depths, self._widths, self._budgets)))

    def neighbours(self, shape: Shape) -> list[Shape]:
        """One step away in one direction; between chains and trees with the nearest budget."""
        depths, widths = _beside(self._depths, shape.depth), _beside(self._widths, shape.width)
        nearest = (self._nearest(shape.budget),)
        found = self._made(depths, (shape.width,), nearest)
        found += self._made((shape.depth,), widths, nearest)
        if not shape.is_chain:
            found += self._made((shape.depth,), (shape.width,), self._budgets_beside(shape.budget))
        return [one for one in dict.fromkeys(found) if one != shape]

    def _nearest(self, budget: int) -> int:
        """The smallest budget of the settings that has room for as many nodes."""
        return next((one for one in self._budgets if one >= budget), self._budgets[-1])

    def _budgets_beside(self, budget: int) -> tuple[int, ...]:
        below = [one for one in self._budgets if one < budget]
        above = [one for one in self._budgets if one > budget]
        return (*below[-1:], *above[:1])

    def _made(
        self, depths: Sequence[int], widths: Sequence[int], budgets: Sequence[int]
    ) -> list[Shape]:
        found: dict[Shape, None] = {}
        for depth in depths:
            for width in widths:
                # A chain shorter than its depth would be another chain.
                usable = [depth] if width == 1 else [one for one in budgets if one >= depth]
                for budget in usable:
                    tree = TreeSettings(depth=depth, width=width, budget=budget)
                    shape = Shape(
                        depth=depth,
                        width=width,
                        budget=tree.num_nodes,
                        controller=self._controller,
                    )
                    found[shape] = None
        return list(found)


def _every_second(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*values[::2], values[-1])))


def _beside(values: Sequence[int], value: int) -> tuple[int, ...]:
    place = values.index(value)
    return (*values[max(0, place - 1) : place], *values[place + 1 : place + 2])
