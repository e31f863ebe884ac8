"""The slab: one allocation on the device that holds the slots of all layers.

low end                                                             high end
│ compute side (unused on the host) │ layer 0 │ layer 1 │ ... │ layer L-1 │
└────────────── slab_bytes - used_bytes ──────┴──── the arena: one range a layer ────┘
"""

from __future__ import annotations

from collections.abc import Sequence

from expertier.errors import BudgetError
from expertier.hip.device import Device
from expertier.tiers.slot_layout import RANGE_ALIGNMENT, Place, SlotLayout
from expertier.units import MIB, mib_needed, round_up


class Slab:
    """One allocation, and in it a range of slots for every layer, stacked from the high end.

    The base never moves; `apply` lays the ranges out anew. Memory is zero at first and after every `apply`.
    """

    def __init__(self, device: Device, layouts: Sequence[SlotLayout], n_bytes: int) -> None:
        """Allocate `n_bytes`, rounded up to `RANGE_ALIGNMENT`; `DeviceError` where that fails."""
        self._device = device
        self._layouts = tuple(layouts)
        self._n_bytes = round_up(n_bytes, RANGE_ALIGNMENT)
        self._slots: tuple[int, ...] = ()
        self._begins: tuple[int, ...] = ()
        self._places: tuple[tuple[Place, ...], ...] = ()
        self._used_bytes = 0
        self._base = device.alloc(self._n_bytes)
        self._closed = False

    @property
    def base(self) -> int:
        """The slab's address."""
        return self._base

    @property
    def n_bytes(self) -> int:
        """The slab's size."""
        return self._n_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the ranges take, guards included."""
        return self._used_bytes

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self._slots

    def apply(self, slots: Sequence[int]) -> None:
        """Lay out `slots[layer]` slots for every layer; all bytes become zero.

        Raises `BudgetError` when they do not fit and `DeviceError` when clearing failed; the ranges are as
        before then.
        """
        sizes = self.check_fits(slots)
        used = sum(sizes)
        if self._slots:
            self._device.zero(self._base, self._n_bytes)
        begin = self._n_bytes - used
        begins = []
        for size in sizes:
            begins.append(begin)
            begin += size
        self._begins = tuple(begins)
        self._places = tuple(layout.place(n) for layout, n in zip(self._layouts, slots, strict=True))
        self._used_bytes = used
        self._slots = tuple(slots)

    def check_fits(self, slots: Sequence[int]) -> list[int]:
        """Return the bytes of each layer's range; raise as `apply` does when they do not fit."""
        if len(slots) != len(self._layouts) or min(slots) < 1:
            raise ValueError(f"{len(self._layouts)} layers need a slot each: got {list(slots)}")
        sizes = [layout.range_bytes(n) for layout, n in zip(self._layouts, slots, strict=True)]
        used = sum(sizes)
        if used > self._n_bytes:
            raise BudgetError(
                f"asked for {sum(slots)} slots, {used / MIB:.3f} MiB, in a slab of {self._n_bytes / MIB:.3f} "
                f"MiB: plan for the manager's arena_bytes, or give at least {mib_needed(used)} MiB"
            )
        return sizes

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where the layer's matrices lie, one a matrix, with offsets from the slab's base."""
        begin = self._begins[layer]
        return tuple(Place(begin + place.offset, place.stride) for place in self._places[layer])

    def copies(self, layer: int, slot: int) -> list[tuple[int, int, int]]:
        """Return (address, offset in the host block, bytes) of each copy that fills a slot."""
        start = self._base + self._begins[layer]
        return [
            (start + copy.target, copy.source, copy.n_bytes)
            for copy in self._layouts[layer].copies(self._places[layer], slot)
        ]

    def check_valid(self) -> None:
        """Assert that the ranges are aligned, disjoint, in order, and end where the slab does (I2)."""
        assert self._used_bytes <= self._n_bytes, f"{self._used_bytes} bytes used of {self._n_bytes}"
        end = self._n_bytes - self._used_bytes
        for layer, (begin, n_slots) in enumerate(zip(self._begins, self._slots, strict=True)):
            assert begin % RANGE_ALIGNMENT == 0, f"layer {layer} begins at {begin}"
            assert begin == end, f"layer {layer} begins at {begin}, the one before ends at {end}"
            end = begin + self._layouts[layer].range_bytes(n_slots)
        assert not self._slots or end == self._n_bytes, f"the ranges end at {end} of {self._n_bytes}"

    def close(self) -> None:
        """Free the slab; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._device.free(self._base)
