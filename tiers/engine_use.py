"""What an engine that is bound to a manager's tiers is told and may ask for: fills, loads, moves of the boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from expertier.interrupts import deferring, interrupts_deferred
from expertier.planner.budget.allocate import LayerPlan
from expertier.tiers.assemble import Assembly
from expertier.tiers.engine.binding import EngineBinding, EngineLayout, bound_layer
from expertier.tiers.engine.read_back import read_matrix
from expertier.tiers.slots.moves import compile_moves


class EngineUse:
    """The engine's side of a `TierManager` (`TierManager.engine`). Thread-safe."""

    def __init__(self, parts: Assembly) -> None:
        """Serve an engine from these tiers."""
        self._parts = parts
        self.completes_layers = True
        """Whether `bind` calls `complete_layers`; for several managers it is called once all of them are bound."""
        self.last_error: BaseException | None = None
        """What made the last fill, load or move of the bound engine fail; None since `bind` where none did."""

    def bind(self) -> EngineBinding:
        """Let an engine use the tiers, and describe them to it.

        Slots and addresses stay as they are until `unbind`, or until the engine itself has the boundary moved
        (`move_boundary`). Raises `BusyError` when an engine is bound already.
        """
        compile_moves()
        bound = False
        try:
            with interrupts_deferred():
                self._begin()
                bound = True
                if self._parts.device.has_own_memory and self.completes_layers:
                    self.complete_layers()
                return self._binding()
        except BaseException:
            if bound:
                self.unbind()
            raise

    @deferring
    def unbind(self) -> None:
        """End the engine's use; nothing to do when none is bound. `BusyError` while it still holds slots."""
        self._parts.usage.unbind(lambda: int(self._parts.residency.pins.sum()))

    def layout(self) -> EngineLayout:
        """Return where the slots lie now, and which tables say who is in them, for a bound engine."""
        layout = self._parts.slab.layout
        return EngineLayout(
            self._parts.residency.directory_address, np.array(layout.slots, np.int32), layout.offsets
        )

    # ---- computing in the slab

    @property
    def computes_in_slab(self) -> bool:
        """Whether an engine's compute buffers lie in the slab."""
        return self._parts.engine_computes

    @property
    def compute_bytes(self) -> int:
        """How many bytes at the slab's base are free of slots now."""
        return self._parts.slab.layout.compute_bytes

    @property
    def most_compute_bytes(self) -> int:
        """How many bytes at the slab's base can be free of slots: all but one slot a layer."""
        return self._parts.boundary.most_bytes()

    @property
    def n_cut_layers(self) -> int:
        """How many layers would have a slot for every expert if nothing were kept free of slots, and have not."""
        parts = self._parts
        sizes = zip(parts.boundary.quotas, parts.slab.slots, parts.table.layers, strict=True)
        return sum(quota == layer.n_experts > n_slots for quota, n_slots, layer in sizes)

    @property
    def slots_are_sound(self) -> bool:
        """False after a move that failed and could not be undone: the next move will try again before all else."""
        return not self._parts.slab.stale_guards

    @deferring
    def move_boundary(
        self,
        n_bytes: int,
        plan: LayerPlan | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Have the slab's first `n_bytes` free of slots and no more, for a bound engine that uses no slots meanwhile.

        With `plan` the layers get its slots, or their share of the rest of the slab. The hottest experts stay. Slots,
        addresses and tables change: `layout` has the new ones. Waits for the leases of other threads. Raises as
        `TierManager.reserve_compute` does; boundary and slots are then as before, but the tables, and which experts are
        in the slots, may have changed.

        `meanwhile` is called when the move is decided, before the device is waited for and with all other users kept
        out; it is not called where nothing has to move.
        """
        missing: list[tuple[int, int]] | None = None

        def follow() -> None:
            nonlocal missing
            missing = self._parts.residency.missing_where_all_fit()
            if meanwhile is not None:
                meanwhile()

        try:
            if self._parts.slab.stale_guards:
                self.restore_guards(for_engine=True)
            self._parts.boundary.move(n_bytes, plan, follow)
        except BaseException as error:
            self.last_error = error
            raise
        if missing is None:  # nothing has moved
            missing = self._parts.residency.missing_where_all_fit()
        if missing:
            self._parts.prefetcher.ask_all(missing)

    @deferring
    def complete_layers(self) -> None:
        """Have layers with a slot for every expert fetch them all in the background: an engine then asks no more."""
        missing = self._parts.residency.missing_where_all_fit()
        if missing:
            self._parts.prefetcher.ask_all(missing)

    # ---- bytes

    @deferring
    def fill(self, layer: int, experts: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """Fill the slots that an engine's `begin` call chose for missing experts, with no layer's lock held.

        May be called from several threads at once. Raises what a read or a copy raises, and `ValueError` where
        `slots[i]` was not chosen for `experts[i]`; keeps it in `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            wanted, chosen = np.asarray(experts, np.int32), np.asarray(slots, np.int32)
            if not self._parts.residency.is_chosen(layer, wanted, chosen):
                raise ValueError(
                    f"asked to fill slots {chosen.tolist()} of layer {layer} with experts {wanted.tolist()}: "
                    "`begin` did not choose them for these, or they are complete"
                )
            self._parts.misses.serve(layer, wanted, chosen)
            self._parts.fences.before_read(layer, chosen.tolist(), None)

    @deferring
    def load(self, layer: int, experts: npt.ArrayLike, address: int) -> None:
        """Copy experts to device memory outside the slots, into a place of the prefill stream.

        Expert `e` lies there as slot `e` of a range of all experts would, from `address` on. L1 is neither used
        nor changed. May be called from several threads. Raises what a read or a copy raises, and keeps it in
        `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            wanted = np.asarray(experts, np.int32).tolist()
            self._parts.table.check_experts(layer, wanted)
            self._parts.filler.load(layer, wanted, address)

    def read_back(self, layer: int, matrix: int, offset: int, target: memoryview) -> None:
        """Fill `target` with a piece of one of a layer's matrices, as the file has it: for what an engine reads back.

        `offset` counts through the matrix of all experts, one after another. L1 and L2 are neither used nor changed.
        May be called from several threads. Raises what a read raises, and keeps it in `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            read_matrix(self._parts.source, self._parts.table.layers[layer], matrix, offset, target)

    def restore_guards(self, *, for_engine: bool = False) -> None:
        """Finish what a failed move of the slots left to do, before anyone uses them."""
        with self._parts.usage.exclusively("use the slots after a failed move", for_engine=for_engine):
            self._parts.relayout.restore_guards()

    # ---- inside

    def _begin(self) -> None:
        """Note that an engine uses the tiers; `BusyError` when one does already."""
        if self._parts.slab.stale_guards:
            self.restore_guards()
        self._parts.usage.bind()
        try:
            self._parts.device.synchronize()  # what was queued before is READY, and has to be there
        except BaseException:
            self.unbind()
            raise
        self.last_error = None

    def _binding(self) -> EngineBinding:
        """Describe the tiers to the engine."""
        parts = self._parts
        return EngineBinding(
            slab_base=parts.slab.base,
            slab_bytes=parts.slab.n_bytes,
            directory_address=parts.residency.directory_address,
            locks_address=parts.locks.address,
            layers=tuple(
                bound_layer(layer, layout, n_slots, parts.slab.places(number))
                for number, (layer, layout, n_slots) in enumerate(
                    zip(parts.table.layers, parts.table.slot_layouts, parts.slab.slots, strict=True)
                )
            ),
            copies=parts.copies.addresses,
        )

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep the error of a `with` block in `last_error`, and raise it."""
        try:
            yield
        except BaseException as error:
            self.last_error = error
            raise
