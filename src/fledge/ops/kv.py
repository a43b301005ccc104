"""Cache memory: one row per slot and layer. Who owns which slot is the engine's business.

Layers are allocated when they are first written, from the shapes they bring, so that key and value
sizes may differ between layers and from each other (multi-head latent attention).
"""

from collections.abc import Mapping

from torch import Tensor


class KVPool:
    """Keys and values of the layers of one network that share slots."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def layer_ids(self) -> set[int]:
        """Layers that were ever written."""
        return set(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for rows in self._layers.values() for t in rows)

    def for_window(self, window: int | None) -> "KVPool":
        """The memory of layers with this window: here all layers share one."""
        del window
        return self

    def write(self, layer: int, slots_T: Tensor, *rows: Tensor) -> None:
        """Store what new tokens bring to a layer: keys and values, or anything else by row."""
        if layer not in self._layers:
            # Not filled: a slot is read only after it was written, and untouched pages cost nothing
            self._layers[layer] = tuple(
                one.new_empty(self.num_slots, *one.shape[1:]) for one in rows
            )
        for pool, fresh in zip(self._layers[layer], rows, strict=True):
            pool[slots_T] = fresh

    def read(self, layer: int, slots_K: Tensor) -> tuple[Tensor, ...]:
        """Rows of the given slots, in their order."""
        return tuple(pool[slots_K] for pool in self._layers[layer])

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy rows in every layer; reads all before it writes, so the two may overlap."""
        for rows in self._layers.values():
            for pool in rows:
                pool[to_slots] = pool[from_slots]


class KVGroups:
    """Memory of a network whose layers differ in their window: each window has its own slots."""

    def __init__(self, num_slots: Mapping[int | None, int]) -> None:
        self.pools = {window: KVPool(count) for window, count in num_slots.items()}

    def for_window(self, window: int | None) -> KVPool:
        return self.pools[window]

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools.values())


class KVProbe:
    """Learns from a pass over one token which windows a network has and what a slot costs."""

    def __init__(self) -> None:
        self.pools: dict[int | None, KVPool] = {}

    def for_window(self, window: int | None) -> KVPool:
        return self.pools.setdefault(window, KVPool(1))

    @property
    def bytes_per_slot(self) -> dict[int | None, int]:
        return {window: pool.num_bytes for window, pool in self.pools.items()}


KVMemory = KVPool | KVGroups | KVProbe
