"""Requests that wait: urgent ones first, clients of equal urgency by turns.

Among clients the one that was served the fewest tokens goes next. A client that comes back after a
pause starts level with those who are waiting, so that a pause saves up nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from fledge.engine.sequence import Sequence


class FairQueue:
    """A queue of thousands: every operation looks at the clients, not at the requests."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, OrderedDict[int, Sequence]]] = {}
        """By priority, client and identity; nothing here is ever empty."""

        self._num_waiting: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        """From the one that goes next on; a client's all together, though clients take turns."""
        for priority in sorted(self._queues, reverse=True):
            clients = self._queues[priority]
            for client in sorted(clients, key=self._served.__getitem__):
                yield from clients[client].values()

    def push(self, seq: Sequence, *, front: bool = False) -> None:
        """Queue a request; at the front of its client's queue if it had been running."""
        if seq.client not in self._num_waiting:
            level = min((self._served[name] for name in self._num_waiting), default=0.0)
            self._served[seq.client] = max(self._served.get(seq.client, 0.0), level)
        waiting = self._queues.setdefault(seq.priority, {}).setdefault(seq.client, OrderedDict())
        waiting[id(seq)] = seq
        waiting.move_to_end(id(seq), last=not front)
        self._num_waiting[seq.client] += 1
        self._len += 1

    def peek(self) -> Sequence | None:
        """The request that goes next."""
        if not self._queues:
            self._served.clear()
            return None
        clients = self._queues[max(self._queues)]
        client = min(clients, key=self._served.__getitem__)
        return next(iter(clients[client].values()))

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None, "the queue is empty"
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take a request out, wherever it stands."""
        clients = self._queues[seq.priority]
        del clients[seq.client][id(seq)]
        if not clients[seq.client]:
            del clients[seq.client]
        if not clients:
            del self._queues[seq.priority]
        self._num_waiting[seq.client] -= 1
        if not self._num_waiting[seq.client]:
            del self._num_waiting[seq.client]
        self._len -= 1

    def charge(self, client: str, num_tokens: int) -> None:
        """A client was served this many tokens, read or said."""
        self._served[client] = self._served.get(client, 0.0) + num_tokens
