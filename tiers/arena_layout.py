"""Where the slots of every layer lie in the slab."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.tiers.slot_layout import GUARD_BYTES, RANGE_ALIGNMENT, Place, SlotLayout
from expertier.units import MIB, mib_needed

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class ArenaLayout:
    """The layers' ranges, stacked against the slab's high end; offsets count from the slab's base. Immutable.

    low end                                                                     high end
    │ compute region │ too small for a slot │ layer 0 │ layer 1 │ ... │ layer L-1 │
    └ compute_bytes ─┴──── rounding ────────┴──────────── used_bytes ─────────────┘
    """

    def __init__(
        self, layouts: Sequence[SlotLayout], slots: Sequence[int], slab_bytes: int, compute_bytes: int
    ) -> None:
        """Lay out `slots[layer]` slots a layer above `compute_bytes`; `BudgetError` when they do not fit."""
        if len(slots) != len(layouts) or min(slots) < 1:
            raise ValueError(f"{len(layouts)} layers need a slot each: got {list(slots)}")
        sizes = [layout.range_bytes(n) for layout, n in zip(layouts, slots, strict=True)]
        self.layouts = tuple(layouts)
        self.slots = tuple(slots)
        self.slab_bytes = slab_bytes
        self.compute_bytes = compute_bytes
        self.used_bytes = sum(sizes)
        if self.used_bytes > slab_bytes - compute_bytes:
            held_back = f", of which {compute_bytes / MIB:.3f} are for computing" if compute_bytes else ""
            raise BudgetError(
                f"asked for {sum(slots)} slots, {self.used_bytes / MIB:.3f} MiB, in a slab of "
                f"{slab_bytes / MIB:.3f} MiB{held_back}: plan for the manager's arena_bytes, or give at least "
                f"{mib_needed(self.used_bytes + compute_bytes)} MiB"
            )
        ends = slab_bytes - self.used_bytes + np.cumsum(sizes)
        self._begins: list[int] = (ends - sizes).tolist()
        self._places = tuple(
            tuple(Place(begin + place.offset, place.stride) for place in layout.place(n))
            for layout, n, begin in zip(layouts, slots, self._begins, strict=True)
        )

    @property
    def rounding_bytes(self) -> int:
        """Bytes above the compute region that no range uses."""
        return self.slab_bytes - self.compute_bytes - self.used_bytes

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where the layer's matrices lie, one a matrix."""
        return self._places[layer]

    def copies(self, layer: int, slot: int) -> list[tuple[int, int, int]]:
        """Return (offset in the slab, offset in the host block, bytes) of each copy that fills a slot."""
        layout, places = self.layouts[layer], self._places[layer]
        if layout.stride:
            return [(places[0].offset + slot * layout.stride, 0, layout.block_bytes)]
        return [
            (place.offset + slot * place.stride, source, size)
            for place, source, size in zip(places, layout.block_offsets, layout.matrix_bytes, strict=True)
        ]

    def pieces(self, layer: int, slots: I64) -> I64:
        """Return (offset, bytes, stride) of every piece of `slots`, in the order of their addresses.

        Shape (pieces, 3): a slot is one piece or one a matrix. `slots` is in increasing order.
        """
        layout, places = self.layouts[layer], self._places[layer]
        if layout.stride:
            arrays = [(places[0].offset, layout.block_bytes, layout.stride)]
        else:
            arrays = [
                (place.offset, size, size) for place, size in zip(places, layout.matrix_bytes, strict=True)
            ]
        rows = np.empty((len(arrays), len(slots), 3), np.int64)
        for row, (offset, size, stride) in zip(rows, arrays, strict=True):
            row[:, 0] = offset + slots * stride
            row[:, 1] = size
            row[:, 2] = stride
        return rows.reshape(-1, 3)

    def all_pieces(self, layers: I32, slots: I32) -> I64:
        """Return the pieces of slots of several layers, as `pieces` does; `layers` and then `slots` rise."""
        if all(layout.stride for layout in self.layouts):
            begins = np.array([places[0].offset for places in self._places], np.int64)
            sizes = np.array([layout.block_bytes for layout in self.layouts], np.int64)
            strides = np.array([layout.stride for layout in self.layouts], np.int64)
            offsets = begins[layers] + slots * strides[layers]
            return np.stack([offsets, sizes[layers], strides[layers]], axis=1)
        bounds = np.searchsorted(layers, np.arange(len(self.layouts) + 1))
        return np.concatenate(
            [
                self.pieces(layer, slots[bounds[layer] : bounds[layer + 1]].astype(np.int64))
                for layer in range(len(self.layouts))
            ]
        )

    def guards(self, free: Sequence[I64]) -> I64:
        """Return (offset, bytes) of what must be zero: the end of every array, and the head of every FREE slot.

        Kernels read up to `GUARD_BYTES` past an expert, where another's bytes do no harm but those of another
        quantisation would. `free[layer]` are the layer's FREE slots. Shape (guards, 2).
        """
        tails: list[tuple[int, int]] = []
        for layer, n_slots in enumerate(self.slots):
            end = self._begins[layer] + self.layouts[layer].range_bytes(n_slots)
            ends = [offset + size for offset, _, size in self.copies(layer, n_slots - 1)]
            tails += [(at, GUARD_BYTES) for at in ends[:-1]]
            tails.append((ends[-1], end - ends[-1]))
        numbers = np.repeat(np.arange(len(free), dtype=np.int32), [len(slots) for slots in free])
        heads = self.all_pieces(numbers, np.concatenate(free).astype(np.int32))[:, :2]
        return np.concatenate(
            [np.array(tails, np.int64), np.minimum(heads, [np.iinfo(np.int64).max, GUARD_BYTES])]
        )

    def shift_to(self, new: ArenaLayout, layer: int) -> int | None:
        """Return by how much slot numbers change where bytes stay: old slot `i` lies where new slot
        `i - shift` lies; None where no slots of the two lie on each other."""
        shifts = set()
        for old_place, new_place in zip(self._places[layer], new._places[layer], strict=True):
            slots, rest = divmod(new_place.offset - old_place.offset, old_place.stride)
            if rest:
                return None
            shifts.add(slots)
        return shifts.pop() if len(shifts) == 1 else None

    def check_valid(self) -> None:
        """Assert that the ranges are aligned, disjoint, in order, and end where the slab does (I2)."""
        assert 0 <= self.compute_bytes <= self.slab_bytes - self.used_bytes, (
            f"{self.compute_bytes} bytes for computing and {self.used_bytes} of slots in {self.slab_bytes}"
        )
        end = self.slab_bytes - self.used_bytes
        for layer, (begin, n_slots) in enumerate(zip(self._begins, self.slots, strict=True)):
            assert begin % RANGE_ALIGNMENT == 0, f"layer {layer} begins at {begin}"
            assert begin == end, f"layer {layer} begins at {begin}, the one before ends at {end}"
            end = begin + self.layouts[layer].range_bytes(n_slots)
        assert end == self.slab_bytes, f"the ranges end at {end} of {self.slab_bytes}"
