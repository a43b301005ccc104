"""Names beside the points of a scatter plot, where they cover neither points nor each other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fledge.lab.chart_frame import LETTER, Frame

_HEIGHT = 12.0
_CLEAR = 5.0
"""Half of a point, with some air."""


class Tag(NamedTuple):
    """A name and where it stands."""

    x: float
    y: float
    text: str
    is_left: bool


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def place_tags(named: Sequence[tuple[float, float, str]], frame: Frame) -> list[Tag]:
    """One tag for each point that has room for one; the first points choose first."""
    taken = [_Box(x - _CLEAR, y - _CLEAR, x + _CLEAR, y + _CLEAR) for x, y, _ in named]
    tags = []
    for x, y, text in named:
        for tag in _candidates(x, y, text):
            box = _box(tag)
            is_inside = box.left >= frame.left and box.right <= frame.right + 10
            if is_inside and not any(box.meets(other) for other in taken):
                taken.append(box)
                tags.append(tag)
                break
    return tags


def _candidates(x: float, y: float, text: str) -> Iterator[Tag]:
    """Below to the right, above to the left, then the other two corners and the sides."""
    for shift_y, is_left in (
        (13, False),
        (-6, True),
        (13, True),
        (-6, False),
        (4, False),
        (4, True),
    ):
        yield Tag(x - 7 if is_left else x + 7, y + shift_y, text, is_left)


def _box(tag: Tag) -> _Box:
    width = len(tag.text) * LETTER * 0.95
    left = tag.x - width if tag.is_left else tag.x
    return _Box(left, tag.y - _HEIGHT + 2, left + width, tag.y + 2)
