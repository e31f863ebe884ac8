"""Where the slots of every layer lie in the slab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.tiers.slot_layout import GUARD_BYTES, RANGE_ALIGNMENT, Place, SlotLayout
from expertier.units import MIB, mib_needed

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    """The arrays that slots form, one a layer or one a matrix, in the order of their addresses: a number of each."""

    layer: I64
    offset: I64
    n_bytes: I64
    stride: I64
    n_slots: I64


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
        self.are_slots = len(rows) == self.n_slots
        self.heads = np.minimum(rows[:, :2], [np.iinfo(np.int64).max, GUARD_BYTES])

    def of_slots(self, chosen: Bools) -> I64:
        """Return the indices of the pieces of the slots that are `chosen`."""
        return (chosen if self.are_slots else chosen[self.slot]).nonzero()[0]


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

    @cached_property
    def offsets(self) -> I64:
        """Where each matrix of each layer lies in slot 0, layer after layer."""
        return np.array([place.offset for places in self._places for place in places], np.int64)

    def taken(self, layers: I32, slots: I32) -> Bools:
        """Return for each slot of all layers, in their order, whether it is one of `slots`."""
        taken = np.zeros(self._pieces.n_slots, np.bool_)
        taken[self._pieces.first_slot[layers] + slots] = True
        return taken

    def pieces(self, layers: I32, slots: I32) -> I64:
        """Return (offset, bytes, stride) of every piece of slots, in the order of their addresses.

        Shape (pieces, 3): a slot is one piece or one a matrix. `layers` and then `slots` rise.
        """
        if self._pieces.are_slots:
            return self._pieces.rows.take(self._pieces.first_slot[layers] + slots, axis=0)
        return self._pieces.rows.take(self._pieces.of_slots(self.taken(layers, slots)), axis=0)

    def slot_numbers(self, layers: I32, slots: I32) -> I64:
        """Return for each of `pieces` which of `slots` it is of, counted from 0."""
        taken = self.taken(layers, slots)
        return (np.cumsum(taken) - 1)[self._pieces.slot[self._pieces.of_slots(taken)]]

    def guards(self, taken: Bools) -> I64:
        """Return (offset, bytes) of what must be zero: the end of every array, and the head of every FREE slot.

        Kernels read up to `GUARD_BYTES` past an expert, where another's bytes do no harm but those of another
        quantisation would. Slots that are not `taken` are FREE. Shape (guards, 2).
        """
        free = self._pieces.of_slots(~taken)
        return np.concatenate([self._tails, self._pieces.heads.take(free, axis=0)])

    def shifts_to(self, new: ArenaLayout) -> tuple[int | None, ...]:
        """Return for each layer by how much slot numbers change where bytes stay: old slot `i` lies where new slot
        `i - shift` lies; None where no slots of the two lie on each other."""
        if self._shifts is None or self._shifts[0] is not new:  # a boundary mostly goes back to where it was
            self._shifts = new, self._shifts_to(new)
        return self._shifts[1]

    def _shifts_to(self, new: ArenaLayout) -> tuple[int | None, ...]:
        arrays = self._arrays
        shifts, rest = np.divmod(new._arrays.offset - arrays.offset, arrays.stride)
        first = np.searchsorted(arrays.layer, np.arange(len(self.layouts)))
        is_whole = (rest == 0) & (shifts == shifts[first][arrays.layer])
        in_line = np.logical_and.reduceat(is_whole, first).tolist()
        return tuple(
            shift if is_in_line else None
            for shift, is_in_line in zip(shifts[first].tolist(), in_line, strict=True)
        )

    @cached_property
    def _arrays(self) -> _Arrays:
        rows: list[tuple[int, int, int, int]] = []
        for layer, (layout, places) in enumerate(zip(self.layouts, self._places, strict=True)):
            if layout.stride:
                rows.append((layer, places[0].offset, layout.block_bytes, layout.stride))
            else:
                rows += [
                    (layer, place.offset, size, place.stride)
                    for place, size in zip(places, layout.matrix_bytes, strict=True)
                ]
        layer, offset, n_bytes, stride = np.array(rows, np.int64).T.copy()
        return _Arrays(layer, offset, n_bytes, stride, np.array(self.slots, np.int64)[layer])

    @cached_property
    def _pieces(self) -> _Pieces:
        arrays = self._arrays
        array = np.repeat(np.arange(len(arrays.layer)), arrays.n_slots)
        number = np.arange(len(array)) - (np.cumsum(arrays.n_slots) - arrays.n_slots)[array]
        rows = np.empty((len(array), 3), np.int64)
        rows[:, 0] = arrays.offset[array] + number * arrays.stride[array]
        rows[:, 1] = arrays.n_bytes[array]
        rows[:, 2] = arrays.stride[array]
        n_slots = np.array(self.slots, np.int64)
        first_slot = np.cumsum(n_slots) - n_slots
        return _Pieces(rows, first_slot[arrays.layer[array]] + number, first_slot)

    @cached_property
    def _tails(self) -> I64:
        arrays = self._arrays
        tails = np.empty((len(arrays.layer), 2), np.int64)
        tails[:, 0] = arrays.offset + (arrays.n_slots - 1) * arrays.stride + arrays.n_bytes
        tails[:, 1] = GUARD_BYTES
        last = np.searchsorted(arrays.layer, np.arange(len(self.layouts)), side="right") - 1
        tails[last, 1] = np.append(self._begins[1:], self.slab_bytes) - tails[last, 0]
        return tails

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
