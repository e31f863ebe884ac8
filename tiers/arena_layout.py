"""Where the slots of every layer lie in the slab."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.tiers.slot_layout import GUARD_BYTES, RANGE_ALIGNMENT, Place, SlotLayout
from expertier.units import MIB, mib_needed

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class _Pieces:
    """The pieces of all slots, in the order of their addresses: what a move asks for is then one look-up.

    `rows` are (offset, bytes, stride), `slot` has each one's slot, counted through all layers, and `first_slot` the
    layers' first ones. `heads` are (offset, bytes) of what must be zero while its slot is FREE.
    """

    def __init__(self, rows: I64, slot: I64, first_slot: I64) -> None:
        self.rows = rows
        self.slot = slot
        self.first_slot = first_slot
        self.n_slots = int(slot.max()) + 1
        self.heads = np.minimum(rows[:, :2], [np.iinfo(np.int64).max, GUARD_BYTES])

    def of_slots(self, chosen: Bools) -> I64:
        """Return the indices of the pieces of the slots that are `chosen`."""
        return np.flatnonzero(chosen if len(self.rows) == self.n_slots else chosen[self.slot])


class ArenaLayout:
    """The layers' ranges, stacked against the slab's high end; offsets count from the slab's base.

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
        self._shifts: tuple[ArenaLayout, tuple[int | None, ...]] | None = None
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

    @cached_property
    def offsets(self) -> I64:
        """Where each matrix of each layer lies in slot 0, layer after layer."""
        return np.array([place.offset for places in self._places for place in places], np.int64)

    def taken(self, layers: I32, slots: I32) -> Bools:
        """Return for each slot of all layers, in their order, whether it is one of `slots`."""
        taken = np.zeros(self._pieces.n_slots, np.bool_)
        taken[self._pieces.first_slot[layers] + slots] = True
        return taken

    def pieces(self, taken: Bools) -> I64:
        """Return (offset, bytes, stride) of every piece of the slots that are `taken`, in the order of their addresses.

        Shape (pieces, 3): a slot is one piece or one a matrix.
        """
        return self._pieces.rows[self._pieces.of_slots(taken)]

    def slot_numbers(self, taken: Bools) -> I64:
        """Return for each of `pieces` which of the slots that are `taken` it is of, counted from 0."""
        return (np.cumsum(taken) - 1)[self._pieces.slot[self._pieces.of_slots(taken)]]

    def guards(self, taken: Bools) -> I64:
        """Return (offset, bytes) of what must be zero: the end of every array, and the head of every FREE slot.

        Kernels read up to `GUARD_BYTES` past an expert, where another's bytes do no harm but those of another
        quantisation would. Slots that are not `taken` are FREE. Shape (guards, 2).
        """
        return np.concatenate([self._tails, self._pieces.heads[self._pieces.of_slots(~taken)]])

    def shifts_to(self, new: ArenaLayout) -> Sequence[int | None]:
        """Return for each layer by how much slot numbers change where bytes stay: old slot `i` lies where new slot
        `i - shift` lies; None where no slots of the two lie on each other."""
        if self._shifts is None or self._shifts[0] is not new:  # a boundary mostly goes back to where it was
            self._shifts = new, tuple(self._shift_to(new, layer) for layer in range(len(self.slots)))
        return self._shifts[1]

    def _shift_to(self, new: ArenaLayout, layer: int) -> int | None:
        shifts = set()
        for old_place, new_place in zip(self._places[layer], new._places[layer], strict=True):
            slots, rest = divmod(new_place.offset - old_place.offset, old_place.stride)
            if rest:
                return None
            shifts.add(slots)
        return shifts.pop() if len(shifts) == 1 else None

    @cached_property
    def _pieces(self) -> _Pieces:
        n_slots = np.array(self.slots, np.int64)
        first_slot = np.cumsum(n_slots) - n_slots
        rows, slots = [], []
        for layer, (layout, places) in enumerate(zip(self.layouts, self._places, strict=True)):
            numbers = np.arange(self.slots[layer])
            arrays = list(zip(places, layout.matrix_bytes, strict=True))
            if layout.stride:
                arrays = [(places[0], layout.block_bytes)]
            for place, size in arrays:
                row = np.empty((len(numbers), 3), np.int64)
                row[:, 0] = place.offset + numbers * place.stride
                row[:, 1] = size
                row[:, 2] = place.stride
                rows.append(row)
                slots.append(first_slot[layer] + numbers)
        return _Pieces(np.concatenate(rows), np.concatenate(slots), first_slot)

    @cached_property
    def _tails(self) -> I64:
        tails: list[tuple[int, int]] = []
        for layer, n_slots in enumerate(self.slots):
            end = self._begins[layer] + self.layouts[layer].range_bytes(n_slots)
            ends = [offset + size for offset, _, size in self.copies(layer, n_slots - 1)]
            tails += [(at, GUARD_BYTES) for at in ends[:-1]]
            tails.append((ends[-1], end - ends[-1]))
        return np.array(tails, np.int64)

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
