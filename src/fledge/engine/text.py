"""From tokens to text while they arrive: whole characters, and nothing of a stop text."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing list of tokens, when somebody asks for the text.

    A token may hold part of a character, or change how its neighbour is spelled, so a window of
    recent tokens is decoded with and without the newest ones, and the difference is the new text.
    Text that ends inside a character is held back until the rest arrives or the answer ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._window_start = 0
        self._num_read = 0
        self._num_tried = 0
        self._text = ""

    def follow(self, token_ids: list[int]) -> None:
        """Decode this list, however it grows."""
        self._token_ids = token_ids

    @property
    def text(self) -> str:
        """All whole characters so far."""
        if self._num_tried < len(self._token_ids):
            self._read()
            self._num_tried = len(self._token_ids)
        return self._text

    def flush(self) -> None:
        """Show what is held back: the answer has ended, the rest will not arrive."""
        text, num_tokens = self.text, len(self._token_ids)
        if self._num_read < num_tokens:
            self._text = text + self._unread(num_tokens)
        self._window_start = self._num_read = num_tokens

    def _read(self) -> None:
        """As many of the new tokens as end with a whole character."""
        for stop in range(len(self._token_ids), self._num_read, -1):
            fresh = self._unread(stop)
            if fresh and not fresh.endswith(_REPLACEMENT):
                self._text += fresh
                self._window_start, self._num_read = self._num_read, stop
                return

    def _unread(self, stop: int) -> str:
        fresh = self._decode(self._token_ids[self._window_start : stop])
        if self._window_start == self._num_read:
            return fresh
        known = self._decode(self._token_ids[self._window_start : self._num_read])
        return fresh[len(known) :]


def find_stop(text: str, stops: Sequence[str], start: int = 0, num_ignored: int = 0) -> int | None:
    """Where the first stop text begins at or after `start` that ends behind the ignored text."""
    found = [
        position
        for stop in stops
        if (position := text.find(stop, max(start, num_ignored - len(stop) + 1))) >= 0
    ]
    return min(found) if found else None


def num_safe(text: str, stops: Sequence[str]) -> int:
    """How much of the text cannot be the beginning of a stop text any more."""
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return len(text) - held
