"""How drafts of one request fared, depth by depth."""

from collections import Counter


class DraftTally:
    """Cycles by how deep their drafts went and how deep the target accepted them.

    Counted many thousand times a second and summed up when somebody asks.
    """

    __slots__ = ("_cycles",)

    def __init__(self) -> None:
        self._cycles: Counter[tuple[int, int]] = Counter()

    def count(self, num_offered: int, num_accepted: int) -> None:
        self._cycles[num_offered, num_accepted] += 1

    @property
    def offered_at_depth(self) -> tuple[int, ...]:
        """Cycles that had a draft at depth 1, 2, ..."""
        return tuple(
            sum(count for (offered, _), count in self._cycles.items() if offered >= depth)
            for depth in self._depths
        )

    @property
    def accepted_at_depth(self) -> tuple[int, ...]:
        """And those whose draft there was accepted."""
        return tuple(
            sum(
                count
                for (offered, accepted), count in self._cycles.items()
                if offered >= depth and accepted >= depth
            )
            for depth in self._depths
        )

    @property
    def _depths(self) -> range:
        return range(1, max((offered for offered, _ in self._cycles), default=0) + 1)
