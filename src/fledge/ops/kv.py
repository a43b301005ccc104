"""Cache memory: one row per slot and layer. Who owns which slot is the engine's business.

Layers are allocated when they are first written, from the shapes they bring, so that key and value
sizes may differ between layers and from each other (multi-head latent attention).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.ops.kernel_choice import needs_check, on_device, run_kernel, uses_kernels

if TYPE_CHECKING:
    from fledge.ops.kv_triton import RowMover

_MOST_MOVES = 128
"""Moves of a group that a kernel takes at once."""


class KVPool:
    """Keys and values of the layers of one network that share slots."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._mover: RowMover | None = None

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

    def hold(self, layer: int, like: Tensor, *shapes: Sequence[int]) -> tuple[Tensor, ...]:
        """All rows of a layer by slot, made if there are none: not a copy, to be written to."""
        if layer not in self._layers:
            # Not filled: a slot is read only after it was written, and untouched pages cost nothing
            self._layers[layer] = tuple(like.new_empty(self.num_slots, *one) for one in shapes)
            self._mover = None
        return self._layers[layer]

    def write(self, layer: int, slots_T: Tensor, *rows: Tensor) -> None:
        """Store what new tokens bring to a layer: keys and values, or anything else by row."""
        if layer not in self._layers:
            # Not filled: a slot is read only after it was written, and untouched pages cost nothing
            pools = tuple(one.new_empty(self.num_slots, *one.shape[1:]) for one in rows)
            self._layers[layer], self._mover = pools, None
        pools = self._layers[layer]

        def write_plain() -> None:
            for pool, fresh in zip(pools, rows, strict=True):
                pool[slots_T] = fresh

        def write_fused() -> None:
            from fledge.ops.kv_triton import write_rows

            with on_device(slots_T):
                write_rows(pools, slots_T, rows)

        def is_right(_: None) -> bool:
            alone_T = written_once(slots_T)
            return all(
                _have_same_bits(pool[slots_T[alone_T]], fresh[alone_T])
                for pool, fresh in zip(pools, rows, strict=True)
            )

        if uses_kernels(slots_T) and len(rows) <= 2:
            kind = tuple((one.dtype, one.shape[1:]) for one in rows)
            run_kernel("cache writes", write_fused, write_plain, kind=kind, is_right=is_right)
        else:
            write_plain()

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """All rows of a layer by slot: not a copy."""
        return self._layers[layer]

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """Rows of the given slots, in their order and shape."""
        # On a CPU several times faster than indexing.
        return tuple(
            pool.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:])
            for pool in self._layers[layer]
        )

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy rows in every layer; reads all before it writes, so the two may overlap."""
        if from_slots.device.type == "cpu":
            # Asking is free here, and what was accepted of a chain lies where it belongs.
            is_elsewhere = from_slots != to_slots
            if not is_elsewhere.any():
                return
            from_slots, to_slots = from_slots[is_elsewhere], to_slots[is_elsewhere]
        for rows in self._layers.values():
            for pool in rows:
                pool[to_slots] = pool[from_slots]

    def compact(self, from_BL: Tensor, to_BL: Tensor) -> None:
        """Move rows in every layer; moves of one group (row) may overlap, groups may not."""
        if not (self._layers and from_BL.shape[1] <= _MOST_MOVES and uses_kernels(from_BL)):
            self.move(from_BL, to_BL)
            return
        pools = [pool for rows in self._layers.values() for pool in rows]
        name, kind = "moves of cache rows", (len(pools), from_BL.shape[1])
        wanted = [pool[from_BL] for pool in pools] if needs_check(name, kind) else None

        def move_fused() -> None:
            from fledge.ops.kv_triton import RowMover

            if self._mover is None:
                self._mover = RowMover(pools)
            with on_device(from_BL):
                self._mover.move(from_BL, to_BL)

        def move_plain() -> None:
            if wanted is None:
                self.move(from_BL, to_BL)
                return
            for pool, rows in zip(pools, wanted, strict=True):
                pool[to_BL] = rows

        def is_right(_: None) -> bool:
            return wanted is None or all(
                _have_same_bits(pool[to_BL], rows) for pool, rows in zip(pools, wanted, strict=True)
            )

        run_kernel(name, move_fused, move_plain, kind=kind, is_right=is_right)


def written_once(slots_T: Tensor) -> Tensor:
    """Rows whose slot no other row has: rows that only fill a pass share theirs."""
    _, place_T, counts = torch.unique(slots_T, return_inverse=True, return_counts=True)
    is_alone_T: Tensor = counts[place_T] == 1
    return is_alone_T


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where they are no numbers, which never equal each other."""
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


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
