"""The slab: one piece of device memory, with the slots of all layers at its high end.

low end                                                                  high end
│ compute region │ rounding │ layer 0 │ layer 1 │ ... │ layer L-1 │
└── at the base ─┘          └──────── the arena: a range a layer ─┘

The base never moves. `relayout` changes the layers' numbers of slots, the size of the compute region, or both, and
moves the experts that stay. Where the memory can be resized (`hip/gpu/slab_memory.py`), the slab can, too:

    larger     admit (takes memory) ──► relayout ──► fit
    smaller    admit                ──► relayout ──► fit (gives memory back)
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
    """Device memory that holds a compute region and above it a range of slots for every layer. Not thread-safe."""

    def __init__(
        self,
        device: Device,
        layouts: Sequence[SlotLayout],
        n_bytes: int,
        memory: SlabMemory | None = None,
    ) -> None:
        """Make a slab of `n_bytes`, rounded up to `RANGE_ALIGNMENT`, in `memory`, which the slab then owns.

        All bytes of `memory` must be zero. Without `memory` the slab makes one plain allocation, and raises
        `DeviceError` where that fails. There are no slots before the first `relayout`.
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
        """The slab's address, where the compute region begins."""
        return self._base

    @property
    def n_bytes(self) -> int:
        """The slab's size in bytes."""
        return self._n_bytes

    @property
    def memory_bytes(self) -> int:
        """The bytes of device memory under the slab: more than its size where memory comes in chunks."""
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
        """Return the layout of `slots[layer]` slots above `compute_bytes`, in a slab of `slab_bytes`.

        By default the slab's size stays the same. Raises `BudgetError` where the slots do not fit.
        """
        size = self._n_bytes if slab_bytes is None else slab_bytes
        return ArenaLayout(self._layouts, slots, size, round_up(compute_bytes, RANGE_ALIGNMENT))

    def places(self, layer: int) -> tuple[Place, ...]:
        """Return where each of the layer's matrices lies, with offsets from the slab's base."""
        return self.layout.places(layer)

    def fills(self, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> Moves:
        """Return the moves that copy the host block at `blocks[i]` into `slots[i]`: rows (target, source, bytes).

        Targets and sources are addresses.
        """
        return self._layouts[layer].fills(self.places(layer), slots, blocks, self._base)

    def relayout(self, new: ArenaLayout, survivors: Survivors, stream: int = 0) -> int:
        """Move the experts of `survivors` to their new slots, and lay out the slots as `new` says.

        The work is queued on `stream`; on a device without streams it may go on until `finish`. Nothing else may use
        the slab meanwhile. Returns the number of bytes moved. Raises `DeviceError`: the layout is then the old one, and
        the experts that `still_there` returns are intact.
        """
        if self._layout is None:
            self._layout = new  # a new slab has only zeros, so there is nothing to do
            compile_moves()  # now, so that no later move waits for it
            return 0
        moves, zeros = self._layout.work_to(new, survivors, self._base)
        self.stale_guards = True  # until all is done, because a failure may leave bytes where zeros belong
        self._relocator.relocate(moves, zeros, stream)
        self._layout, self._n_bytes = new, new.slab_bytes
        self.stale_guards = False
        return int(moves[:, 2].sum())

    def finish(self) -> None:
        """Wait for the end of `relayout` on a device without streams; elsewhere return at once."""
        self._relocator.finish()

    def still_there(self, new: ArenaLayout, survivors: Survivors) -> Survivors:
        """Return the survivors whose bytes a failed `relayout` to `new` cannot have overwritten."""
        moves, zeroed = self.layout.work_to(new, survivors)
        written = np.concatenate([moves, np.stack([zeroed[:, 0], zeroed[:, 0], zeroed[:, 1]], axis=1)])
        here = survivors.layer, survivors.old_slot
        is_lost = ~untouched(self.layout.pieces(*here), written)
        intact = np.ones(len(survivors.layer), np.bool_)
        intact[self.layout.slot_numbers(survivors.layer)[is_lost]] = False
        return some_of(survivors, intact)

    def restore_guards(self, here: Survivors, stream: int = 0) -> None:
        """Zero the guards again, where a failed `relayout` may have left other bytes in them.

        `here` has all residents, with their slots in `new_slot`. Raises `DeviceError`.
        """
        if self.stale_guards:
            zeros = self.layout.guards(here.layer, here.new_slot)
            zeros[:, 0] += self._base
            zero_pieces(self._device, zeros, stream)
            self.stale_guards = False

    # ---- another size

    def admit(self, n_bytes: int) -> None:
        """Take the memory for a slab of `n_bytes`, before a `relayout` to that size.

        Raises `DeviceError`, with nothing changed, where the memory is not to be had, or cannot be resized at all.
        """
        if n_bytes > self._n_bytes or not self._memory.resizable:
            self._memory.resize(n_bytes)

    def fit(self) -> None:
        """Give the memory beyond the slab's size back, after all work of the device is done.

        Where that fails, a warning is logged. The slab then keeps the memory, and the next `fit` tries again.
        """
        try:
            self._memory.resize(self._n_bytes)
        except DeviceError as error:
            _log.warning(
                "the slab has %s, and %s of memory: the memory beyond the slab could not be given back (%s)",
                mib(self._n_bytes),
                mib(self._memory.n_bytes),
                error,
            )

    def check_valid(self) -> None:
        """Assert that ranges and compute region are aligned and disjoint, and end with the slab (I2)."""
        assert self._n_bytes <= self._memory.n_bytes, f"{self._memory.n_bytes} bytes under {self._n_bytes}"
        if self._layout is not None:
            assert self._layout.slab_bytes == self._n_bytes
            self._layout.check_valid()

    def close(self) -> None:
        """Free the slab; a second call does nothing."""
        self._memory.close()
