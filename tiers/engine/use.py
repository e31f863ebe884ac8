"""What an engine does with a manager's tiers: binding, fills, loads, and moves of the boundary."""

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
    """The calls that an engine makes on a `TierManager`, which has this object as `engine`. Thread-safe."""

    def __init__(self, parts: Assembly, *, completes_layers: bool = True) -> None:
        """Serve an engine with the tiers that consist of `parts`.

        `completes_layers` says whether `bind` calls `complete_layers`.
        """
        self._parts = parts
        self._completes_layers = completes_layers
        self.last_error: BaseException | None = None
        """The error of the engine's last fill, load or move that failed; None where none has failed since `bind`."""

    def bind(self) -> EngineBinding:
        """Let an engine use the tiers, and return their description.

        Slots and addresses stay as they are until `unbind`, or until the engine itself has the boundary moved
        (`move_boundary`). Raises `BusyError` where an engine is bound already.
        """
        compile_moves()
        bound = False
        try:
            with interrupts_deferred():
                self._begin()
                bound = True
                if self._parts.device.has_own_memory and self._completes_layers:
                    self.complete_layers()
                return self._binding()
        except BaseException:
            if bound:
                self.unbind()
            raise

    @deferring
    def unbind(self) -> None:
        """End the engine's use of the tiers; nothing to do where none is bound.

        Raises `BusyError` while the engine still holds slots.
        """
        self._parts.usage.unbind(lambda: int(self._parts.residency.pins.sum()))

    def layout(self) -> EngineLayout:
        """Return the present layout of the slots, and the address of the tables, for a bound engine."""
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
        """How many bytes at the slab's base can be free of slots: all of the slab except one slot for each layer."""
        return self._parts.boundary.most_bytes()

    @property
    def n_cut_layers(self) -> int:
        """How many layers lack a slot for every expert only because memory is kept free of slots for computing."""
        parts = self._parts
        sizes = zip(parts.boundary.quotas, parts.slab.slots, parts.table.layers, strict=True)
        return sum(quota == layer.n_experts > n_slots for quota, n_slots, layer in sizes)

    @property
    def slots_are_sound(self) -> bool:
        """False after a move that failed and could not be undone; the next move tries first to put that right."""
        return not self._parts.slab.stale_guards

    @deferring
    def move_boundary(
        self,
        n_bytes: int,
        plan: LayerPlan | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Move the boundary so that exactly the slab's first `n_bytes` are free of slots.

        This is for a bound engine, which must use no slots meanwhile. With `plan` the layers get its slots, shrunk to
        what the rest of the slab holds. The hottest experts stay. Slots, addresses and tables change; `layout` returns
        the new ones. Waits for the leases of other threads. Raises what `TierManager.reserve_compute` raises; boundary
        and slots are then as before, but the tables, and which experts are in the slots, may have changed.

        `meanwhile` is called when layout and tables are the new ones, before the device is waited for, while all other
        users are kept out. It is not called where nothing has to move.
        """
        missing: list[tuple[int, int]] | None = None

        def after_layout() -> None:
            nonlocal missing
            missing = self._parts.residency.missing_where_all_fit()
            if meanwhile is not None:
                meanwhile()

        try:
            if self._parts.slab.stale_guards:
                self.restore_guards(for_engine=True)
            self._parts.boundary.move(n_bytes, plan, after_layout)
        except BaseException as error:
            self.last_error = error
            raise
        if missing is None:  # nothing had to move, so the callback was not called
            missing = self._parts.residency.missing_where_all_fit()
        if missing:
            self._parts.prefetcher.ask_all(missing)

    @deferring
    def complete_layers(self) -> None:
        """Fetch all experts of layers with a slot for every expert, in the background; such layers then never miss."""
        missing = self._parts.residency.missing_where_all_fit()
        if missing:
            self._parts.prefetcher.ask_all(missing)

    # ---- bytes

    @deferring
    def fill(self, layer: int, experts: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """Fill the slots that an engine's call of `begin` chose for missing experts; no layer's lock may be held.

        Several threads may call it at once. Raises what a read or a copy raises, and `ValueError` where `slots[i]` was
        not chosen for `experts[i]`; the error is kept in `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            wanted, chosen = np.asarray(experts, np.int32), np.asarray(slots, np.int32)
            if not self._parts.residency.is_chosen(layer, wanted, chosen):
                raise ValueError(
                    f"asked to fill slots {chosen.tolist()} of layer {layer} with experts {wanted.tolist()}: "
                    "`begin` did not choose these slots for these experts, or the fills are complete already"
                )
            self._parts.misses.serve(layer, wanted, chosen)
            self._parts.fences.before_read(layer, chosen.tolist(), None)

    @deferring
    def load(self, layer: int, experts: npt.ArrayLike, address: int) -> None:
        """Copy experts into a place of the prefill stream: device memory outside the slots, at `address`.

        The memory is laid out as a range with a slot for every expert of the layer, and expert `e` goes into slot `e`
        of it. L1 is neither used nor changed. Several threads may call it at once. Raises what a read or a copy raises,
        and keeps the error in `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            wanted = np.asarray(experts, np.int32).tolist()
            self._parts.table.check_experts(layer, wanted)
            self._parts.filler.load(layer, wanted, address)

    def read_back(self, layer: int, matrix: int, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of the layer's expert tensor number `matrix`, as the file has them.

        This is for an engine that reads a tensor back. `offset` counts through the matrices of all experts, one after
        another. L1 and L2 are neither used nor changed. Several threads may call it at once. Raises what a read raises,
        and keeps the error in `last_error`.
        """
        with self._noting_errors(), self._parts.usage.engine_fill():
            read_matrix(self._parts.source, self._parts.table.layers[layer], matrix, offset, target)

    def restore_guards(self, *, for_engine: bool = False) -> None:
        """Zero the guards that a failed move has left stale, which has to be done before the slots are used."""
        with self._parts.usage.exclusively("use the slots after a failed move", for_engine=for_engine):
            self._parts.relayout.restore_guards()

    # ---- inside

    def _begin(self) -> None:
        """Note that an engine uses the tiers. Raises `BusyError` where an engine is bound already."""
        if self._parts.slab.stale_guards:
            self.restore_guards()
        self._parts.usage.bind()
        try:
            self._parts.device.synchronize()  # an engine reads READY slots at once, so no fill may be queued
        except BaseException:
            self.unbind()
            raise
        self.last_error = None

    def _binding(self) -> EngineBinding:
        """Return the description of the tiers for the engine."""
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
