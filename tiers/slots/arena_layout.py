"""Where the slots of every layer lie in the slab."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.policy.repack import NOT_IN_LINE, Survivors
from expertier.tiers.model.slot_layout import GUARD_BYTES, RANGE_ALIGNMENT, Place, SlotLayout
from expertier.units import MIB, mib_needed

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class ArenaLayout:
    """Where the layers' ranges lie: one after another, up to the slab's high end. Offsets count from the slab's base.

    low end                                                                     high end
    │ compute region │ too small for a slot │ layer 0 │ layer 1 │ ... │ layer L-1 │
    └ compute_bytes ─┴──── rounding ────────┴──────────── used_bytes ─────────────┘
    """

    def __init__(
        self, layouts: Sequence[SlotLayout], slots: Sequence[int], slab_bytes: int, compute_bytes: int
    ) -> None:
        """Lay out `slots[layer]` slots for each layer above `compute_bytes`; `BudgetError` where they do not fit."""
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
        self._shifts: tuple[ArenaLayout, I64] | None = None
        self._begins: list[int] = (ends - sizes).tolist()
        self._places = tuple(
            tuple(Place(begin + place.offset, place.stride) for place in layout.place(n))
            for layout, n, begin in zip(layouts, slots, self._begins, strict=True)
        )

    @property
    def rounding_bytes(self) -> int:
        """The bytes above the compute region that no range uses."""
        return self.slab_bytes - self.compute_bytes - self.used_bytes

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where each of the layer's matrices lies."""
        return self._places[layer]

    @cached_property
    def offsets(self) -> I64:
        """The offset of each matrix in slot 0, for all layers one after another."""
        return np.array([place.offset for places in self._places for place in places], np.int64)

    def pieces(self, layers: I32, slots: I32) -> I64:
        """Return the pieces of the given slots as rows (offset, bytes, stride), in the order of their addresses.

        Slot `slots[i]` of layer `layers[i]` is one piece, or one piece for each matrix. The slots must be sorted by
        layer, then by slot.
        """
        from expertier.tiers.slots.move_runs import write_pieces  # imports Numba

        rows = np.empty((self.n_pieces, 3), np.int64)
        return rows[: write_pieces(layers, slots, self.arrays, rows)]

    def slot_numbers(self, layers: I32) -> I64:
        """Return for each row of `pieces` the index in `layers`, which rise, of the slot that the piece belongs to."""
        first, after = (np.searchsorted(layers, self.arrays[:, 0], side=side) for side in ("left", "right"))
        return np.concatenate([np.arange(*ends) for ends in zip(first.tolist(), after.tolist(), strict=True)])

    def guards(self, layers: I32, slots: I32) -> I64:
        """Return what must be zero, as rows (offset, bytes): the end of every array, and the head of every FREE slot.

        Kernels read up to `GUARD_BYTES` past an expert. Bytes of another expert of the same type do no harm there, but
        bytes of another quantisation would. All slots are FREE except `slots[i]` of layer `layers[i]`, sorted by layer,
        then by slot.
        """
        from expertier.tiers.slots.move_runs import write_guards  # imports Numba

        zeros = np.empty((len(self._tails) + self.n_pieces, 2), np.int64)
        return zeros[: write_guards(layers, slots, self.arrays, self._tails, 0, zeros)]

    def work_to(self, new: ArenaLayout, survivors: Survivors, base: int = 0) -> tuple[I64, I64]:
        """Return the moves and the zeroing that take the slab at address `base` from this layout to `new`.

        The moves bring the experts of `survivors` to their new slots: rows (target, source, bytes), in the order of
        `moves.order_moves`. Afterwards the `guards` of `new`, rows (address, bytes), have to be zeroed. Both come from
        one compiled call, because a move of the boundary waits for them.
        """
        from expertier.tiers.slots.move_runs import write_work  # imports Numba

        tails = new._tails
        moves = np.empty((self.n_pieces + 1, 3), np.int64)
        zeros = np.empty((len(tails) + new.n_pieces, 2), np.int64)
        layer, _, old_slot, new_slot = survivors
        n_moves, n_zeros = divmod(
            write_work(layer, old_slot, new_slot, self.arrays, new.arrays, tails, base, moves, zeros),
            len(zeros) + 1,
        )
        return moves[:n_moves], zeros[:n_zeros]

    @cached_property
    def n_slots(self) -> I32:
        """`slots` as an array."""
        return np.array(self.slots, np.int32)

    def shifts_to(self, new: ArenaLayout) -> I64:
        """Return for each layer the shift between old and new slot numbers at the same address.

        Old slot `i` lies where new slot `i - shift` lies. The shift is `NOT_IN_LINE` where new slots do not begin at
        the addresses of old ones.
        """
        if self._shifts is None or self._shifts[0] is not new:  # a boundary mostly goes back and forth
            self._shifts = new, self._shifts_to(new)
        return self._shifts[1]

    def _shifts_to(self, new: ArenaLayout) -> I64:
        layer, offset, _, stride, _ = self.arrays.T
        shifts, rest = np.divmod(new.arrays[:, 1] - offset, stride)
        first = np.searchsorted(layer, np.arange(len(self.layouts)))
        keeps_slots_in_line = (rest == 0) & (shifts == shifts[first][layer])
        in_line = np.logical_and.reduceat(keeps_slots_in_line, first)
        return np.where(in_line, shifts[first], NOT_IN_LINE)

    @cached_property
    def arrays(self) -> I64:
        """The arrays that slots form, as rows (layer, offset, bytes of a piece, stride, slots), in address order.

        A layer has one array, or one for each matrix, as its `SlotLayout` says.
        """
        rows: list[tuple[int, int, int, int, int]] = []
        for layer, (layout, places, n) in enumerate(zip(self.layouts, self._places, self.slots, strict=True)):
            if layout.stride:
                rows.append((layer, places[0].offset, layout.block_bytes, layout.stride, n))
            else:
                rows += [
                    (layer, place.offset, size, place.stride, n)
                    for place, size in zip(places, layout.matrix_bytes, strict=True)
                ]
        return np.array(rows, np.int64)

    @cached_property
    def n_pieces(self) -> int:
        """How many pieces all slots have."""
        return int(self.arrays[:, 4].sum())

    @cached_property
    def _tails(self) -> I64:
        layer, offset, n_bytes, stride, n_slots = self.arrays.T
        tails = np.empty((len(layer), 2), np.int64)
        tails[:, 0] = offset + (n_slots - 1) * stride + n_bytes
        tails[:, 1] = GUARD_BYTES
        last = np.searchsorted(layer, np.arange(len(self.layouts)), side="right") - 1
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
