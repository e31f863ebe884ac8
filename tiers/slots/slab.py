"""The slab: memory on the device, with the slots of all layers at its high end.

low end                                                                  high end
│ compute region │ rounding │ layer 0 │ layer 1 │ ... │ layer L-1 │
└── at the base ─┘          └──────── the arena: a range a layer ─┘

The base never moves. `relayout` gives the layers other numbers of slots, the compute region another size, or
both, and takes the experts that stay along. Where memory can be resized (`hip/gpu/slab_memory.py`), so can the slab:

    larger     admit (memory for it) ──► relayout ──► fit
    smaller    admit                 ──► relayout ──► fit (what is beyond goes back)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from expertier.errors import DeviceError
from expertier.hip.device import Device, Moves
from expertier.hip.gpu.slab_memory import PlainSlabMemory, SlabMemory
from expertier.hip.zeros import Relocator, zero_pieces
from expertier.planner.policy.repack import Survivors
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT, Place, SlotLayout
from expertier.tiers.slots.arena_layout import ArenaLayout
from expertier.tiers.slots.moves import compile_moves, untouched
from expertier.tiers.slots.survivors import some_of
from expertier.units import mib, round_up

_log = logging.getLogger(__name__)


class Slab:
    """Device memory, and in it a range of slots for every layer above a compute region. Not thread-safe."""

    def __init__(
        self,
        device: Device,
        layouts: Sequence[SlotLayout],
        n_bytes: int,
        memory: SlabMemory | None = None,
    ) -> None:
        """Take `n_bytes`, rounded up to `RANGE_ALIGNMENT`, of `memory`, which is zero and becomes the slab's own.

        Without `memory` it is one plain allocation; `DeviceError` where that fails. There are no slots before
        `relayout`.
        """
        self._device = device
        self._relocator = Relocator(device)
        self._layouts = tuple(layouts)
        self._n_bytes = round_up(n_bytes, RANGE_ALIGNMENT)
        self._layout: ArenaLayout | None = None
        self.stale_guards = False
        """Whether `restore_guards` has work to do before the slab is used."""
        self._memory = memory if memory is not None else PlainSlabMemory(device, self._n_bytes)
        self._base = self._memory.base

    @property
    def base(self) -> int:
        """The slab's address, which is the compute region's."""
        return self._base

    @property
    def n_bytes(self) -> int:
        """The slab's size."""
        return self._n_bytes

    @property
    def memory_bytes(self) -> int:
        """The device memory under it, which may come in chunks."""
        return self._memory.n_bytes

    @property
    def layout(self) -> ArenaLayout:
        """Where the slots lie now."""
        assert self._layout is not None, "relayout first"
        return self._layout

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self.layout.slots

    def plan(self, slots: Sequence[int], compute_bytes: int, slab_bytes: int | None = None) -> ArenaLayout:
        """Return the layout of `slots[layer]` slots above `compute_bytes`; `BudgetError` if they do not fit.

        `slab_bytes` is the slab's size then, by default the one that it has.
        """
        size = self._n_bytes if slab_bytes is None else slab_bytes
        return ArenaLayout(self._layouts, slots, size, round_up(compute_bytes, RANGE_ALIGNMENT))

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where the layer's matrices lie, one a matrix, with offsets from the slab's base."""
        return self.layout.places(layer)

    def fills(self, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> Moves:
        """Return what copies experts from host blocks into slots: rows of (target, source, bytes), all addresses."""
        return self._layouts[layer].fills(self.places(layer), slots, blocks, self._base)

    def relayout(self, new: ArenaLayout, survivors: Survivors, stream: int = 0) -> int:
        """Move the experts of `survivors` to their new slots, and lay out the slots as `new` says.

        Queues the work on `stream`; nothing else may be using the slab, and on a device without streams not before
        `finish`. Returns the bytes moved. Raises `DeviceError`; the layout is the old one then, and the experts that
        `still_there` names are intact.
        """
        if self._layout is None:
            self._layout = new  # of a new slab every byte is zero
            compile_moves()  # before somebody waits for one
            return 0
        moves, zeros = self._layout.work_to(new, survivors, self._base)
        self.stale_guards = True  # until all is done: a failure may leave bytes where zeros belong
        self._relocator.relocate(moves, zeros, stream)
        self._layout, self._n_bytes = new, new.slab_bytes
        self.stale_guards = False
        return int(moves[:, 2].sum())

    def finish(self) -> None:
        """Wait for what `relayout` has queued, on a device without streams."""
        self._relocator.finish()

    def still_there(self, new: ArenaLayout, survivors: Survivors) -> Survivors:
        """Return those of `survivors` whose bytes a failed `relayout` to `new` cannot have touched."""
        moves, zeroed = self.layout.work_to(new, survivors)
        written = np.concatenate([moves, np.stack([zeroed[:, 0], zeroed[:, 0], zeroed[:, 1]], axis=1)])
        here = survivors.layer, survivors.old_slot
        is_lost = ~untouched(self.layout.pieces(*here), written)
        intact = np.ones(len(survivors.layer), np.bool_)
        intact[self.layout.slot_numbers(survivors.layer)[is_lost]] = False
        return some_of(survivors, intact)

    def restore_guards(self, here: Survivors, stream: int = 0) -> None:
        """Zero what must be zero with `here` in their new slots, where a failed `relayout` may have left bytes.

        Raises `DeviceError`.
        """
        if self.stale_guards:
            zeros = self.layout.guards(here.layer, here.new_slot)
            zeros[:, 0] += self._base
            zero_pieces(self._device, zeros, stream)
            self.stale_guards = False

    # ---- another size

    def admit(self, n_bytes: int) -> None:
        """Have memory for a slab of `n_bytes`, before a `relayout` to that size.

        Raises `DeviceError`, with nothing changed, where it cannot be had, and for any other size where the memory
        cannot be resized.
        """
        if n_bytes > self._n_bytes or not self._memory.resizable:
            self._memory.resize(n_bytes)

    def fit(self) -> None:
        """Give memory beyond the slab back, once all work of the device is done.

        Where that fails a warning says so: the slab has its size all the same, and the next `fit` tries again.
        """
        try:
            self._memory.resize(self._n_bytes)
        except DeviceError as error:
            _log.warning(
                "the slab has %s, and %s of memory: what is beyond could not be given back (%s)",
                mib(self._n_bytes),
                mib(self._memory.n_bytes),
                error,
            )

    def check_valid(self) -> None:
        """Assert that ranges and compute region are aligned and disjoint and fill the slab (I2)."""
        assert self._n_bytes <= self._memory.n_bytes, f"{self._memory.n_bytes} bytes under {self._n_bytes}"
        if self._layout is not None:
            assert self._layout.slab_bytes == self._n_bytes
            self._layout.check_valid()

    def close(self) -> None:
        """Free the slab; a second call does nothing."""
        self._memory.close()
