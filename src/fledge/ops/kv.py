"""Cache memory: one row per slot and layer. Who owns which slot is the engine's business.

Layers are allocated when they are first written, from the shapes they bring, so that key and value
sizes may differ between layers and from each other (multi-head latent attention).
"""

from torch import Tensor


class KVPool:
    """Keys and values of all layers of one network, by slot."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def layer_ids(self) -> set[int]:
        """Layers that were ever written."""
        return set(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def grow(self, num_slots: int) -> None:
        """Make room for more slots; what is stored stays where it is."""
        if num_slots <= self.num_slots:
            return
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (_grown(keys, num_slots), _grown(values, num_slots))
        self.num_slots = num_slots

    def write(self, layer: int, slots_T: Tensor, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Store the keys and values of new tokens."""
        if layer not in self._layers:
            self._layers[layer] = (
                keys_THD.new_zeros(self.num_slots, *keys_THD.shape[1:]),
                values_THD.new_zeros(self.num_slots, *values_THD.shape[1:]),
            )
        pool_keys, pool_values = self._layers[layer]
        pool_keys[slots_T] = keys_THD
        pool_values[slots_T] = values_THD

    def read(self, layer: int, slots_K: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the given slots, in their order."""
        pool_keys, pool_values = self._layers[layer]
        return pool_keys[slots_K], pool_values[slots_K]

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy rows in every layer; reads all before it writes, so the two may overlap."""
        for pool_keys, pool_values in self._layers.values():
            pool_keys[to_slots] = pool_keys[from_slots]
            pool_values[to_slots] = pool_values[from_slots]


def _grown(rows: Tensor, num_rows: int) -> Tensor:
    grown = rows.new_zeros(num_rows, *rows.shape[1:])
    grown[: rows.shape[0]] = rows
    return grown
