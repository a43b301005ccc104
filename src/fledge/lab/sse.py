"""Server-sent events out of raw bytes, at the price of a split per read.

The reader hands out payloads as bytes and looks at nothing in them: whoever measures takes the
time first, and reads the JSON when there is nothing left to measure.
"""


class SseReader:
    """Cuts a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that became whole with these bytes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._lines:
                    events.append(b"\n".join(self._lines))
                    self._lines = []
            elif line.startswith(b"data:"):
                self._lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            # Comments keep a connection alive; names and ids of events say nothing here.
        return events
