"""Requests that wait: urgent ones first, clients of equal urgency by turns.

Among clients the one that was served the fewest tokens goes next. A client that comes back after a
pause starts level with those who are waiting, so that a pause saves up nothing.
"""

from collections import deque
from collections.abc import Iterator

from fledge.engine.sequence import Sequence


class FairQueue:
    """A queue of thousands: every operation looks at the clients, not at the requests."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, deque[Sequence]]] = {}
        self._served: dict[str, float] = {}
        self._gone: set[int] = set()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        for clients in self._queues.values():
            for waiting in clients.values():
                yield from (seq for seq in waiting if id(seq) not in self._gone)

    def push(self, seq: Sequence, *, front: bool = False) -> None:
        """Queue a request; at the front of its client's queue if it had been running."""
        clients = self._queues.setdefault(seq.priority, {})
        if seq.client not in clients:
            clients[seq.client] = deque()
            waiting = [self._served[name] for name in self._waiting_clients() if name != seq.client]
            level = min(waiting, default=0.0)
            self._served[seq.client] = max(self._served.get(seq.client, 0.0), level)
        if front:
            clients[seq.client].appendleft(seq)
        else:
            clients[seq.client].append(seq)
        self._len += 1

    def peek(self) -> Sequence | None:
        """The request that goes next."""
        while self._queues:
            priority = max(self._queues)
            clients = self._queues[priority]
            while clients:
                client = min(clients, key=self._served.__getitem__)
                waiting = clients[client]
                while waiting and id(waiting[0]) in self._gone:
                    self._gone.remove(id(waiting.popleft()))
                if waiting:
                    return waiting[0]
                del clients[client]
            del self._queues[priority]
        self._served.clear()
        return None

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None, "the queue is empty"
        self._queues[seq.priority][seq.client].popleft()
        self._len -= 1
        return seq

    def remove(self, seq: Sequence) -> None:
        """A waiting request was cancelled; its place is cleared when its turn comes."""
        self._gone.add(id(seq))
        self._len -= 1

    def charge(self, client: str, num_tokens: int) -> None:
        """A client was served this many tokens, read or said."""
        self._served[client] = self._served.get(client, 0.0) + num_tokens

    def _waiting_clients(self) -> set[str]:
        return {name for clients in self._queues.values() for name in clients}
