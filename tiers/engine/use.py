"""What a bound engine does with a manager's tiers: fills, loads for the prefill stream, moves of the boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from expertier.hip.device import Device
from expertier.planner.budget.allocate import LayerPlan
from expertier.planner.policy.residency import Residency
from expertier.tiers.access.usage import Usage
from expertier.tiers.engine.binding import EngineBinding, EngineLayout, bound_layer
from expertier.tiers.engine.read_back import read_matrix
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.fill.filler import Filler
from expertier.tiers.fill.prefetcher import Prefetcher
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.layer_locks import LayerLocks
from expertier.tiers.slots.boundary import Boundary
from expertier.tiers.slots.fences import SlotFences
from expertier.tiers.slots.moves import compile_moves
from expertier.tiers.slots.relayout import Relayout
from expertier.tiers.slots.slab import Slab

I32 = npt.NDArray[np.int32]


class EngineUse:
    """The engine's side of a `TierManager`, which has these methods for others. Thread-safe."""

    def __init__(
        self,
        table: ExpertTable,
        device: Device,
        *,
        slab: Slab,
        residency: Residency,
        locks: LayerLocks,
        copies: CopyDirectory,
        filler: Filler,
        fences: SlotFences,
        usage: Usage,
        relayout: Relayout,
        boundary: Boundary,
        prefetcher: Prefetcher,
        source: ByteSource,
        serve: Callable[[int, I32, I32], None],
    ) -> None:
        """Connect; `serve(layer, experts, slots)` fills slots of missing experts."""
        self._table = table
        self._device = device
        self._slab = slab
        self._residency = residency
        self._locks = locks
        self._copies = copies
        self._filler = filler
        self._fences = fences
        self._usage = usage
        self._relayout = relayout
        self._boundary = boundary
        self._prefetcher = prefetcher
        self._source = source
        self._serve = serve
        self.last_error: BaseException | None = None
        """What made the last fill, load or move fail."""

    def bind(self) -> None:
        """Let the engine use the tiers; `BusyError` when one is bound already."""
        if self._slab.stale_guards:
            self.restore_guards()
        compile_moves()
        self._usage.bind()
        try:
            self._device.synchronize()  # what was queued before it came is READY, and has to be there
        except BaseException:
            self.unbind()
            raise
        self.last_error = None

    def binding(self) -> EngineBinding:
        """Describe the tiers to the engine."""
        return EngineBinding(
            slab_base=self._slab.base,
            slab_bytes=self._slab.n_bytes,
            directory_address=self._residency.directory_address,
            locks_address=self._locks.address,
            layers=tuple(
                bound_layer(layer, layout, n_slots, self._slab.places(number))
                for number, (layer, layout, n_slots) in enumerate(
                    zip(self._table.layers, self._table.slot_layouts, self._slab.slots, strict=True)
                )
            ),
            copies=self._copies.addresses,
        )

    def layout(self) -> EngineLayout:
        """See `TierManager.engine_layout`."""
        layout = self._slab.layout
        return EngineLayout(
            self._residency.directory_address, np.array(layout.slots, np.int32), layout.offsets
        )

    @property
    def n_cut_layers(self) -> int:
        """See `TierManager.n_cut_layers`."""
        sizes = zip(self._boundary.quotas, self._slab.slots, self._table.layers, strict=True)
        return sum(quota == layer.n_experts > n_slots for quota, n_slots, layer in sizes)

    def move_boundary(
        self, n_bytes: int, plan: LayerPlan | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """See `TierManager.move_boundary`."""
        missing: list[tuple[int, int]] | None = None

        def follow() -> None:
            nonlocal missing
            missing = self._residency.missing_where_all_fit()
            if meanwhile is not None:
                meanwhile()

        try:
            if self._slab.stale_guards:
                self.restore_guards(for_engine=True)
            self._boundary.move(n_bytes, plan, follow)
        except BaseException as error:
            self.last_error = error
            raise
        if missing is None:  # nothing has moved
            missing = self._residency.missing_where_all_fit()
        if missing:
            self._prefetcher.ask_all(missing)

    def complete_layers(self) -> None:
        """See `TierManager.complete_layers`."""
        missing = self._residency.missing_where_all_fit()
        if missing:
            self._prefetcher.ask_all(missing)

    def fill(self, layer: int, experts: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """See `TierManager.fill`."""
        with self._noting_errors(), self._usage.engine_fill():
            wanted, chosen = np.asarray(experts, np.int32), np.asarray(slots, np.int32)
            if not self._residency.is_chosen(layer, wanted, chosen):
                raise ValueError(
                    f"asked to fill slots {chosen.tolist()} of layer {layer} with experts {wanted.tolist()}: "
                    "`begin` did not choose them for these, or they are complete"
                )
            self._serve(layer, wanted, chosen)
            self._fences.before_read(layer, chosen.tolist(), None)

    def load(self, layer: int, experts: npt.ArrayLike, address: int) -> None:
        """See `TierManager.load`."""
        with self._noting_errors(), self._usage.engine_fill():
            wanted = np.asarray(experts, np.int32).tolist()
            self._table.check_experts(layer, wanted)
            self._filler.load(layer, wanted, address)

    def read_back(self, layer: int, matrix: int, offset: int, target: memoryview) -> None:
        """See `TierManager.read_back`."""
        with self._noting_errors(), self._usage.engine_fill():
            read_matrix(self._source, self._table.layers[layer], matrix, offset, target)

    def restore_guards(self, *, for_engine: bool = False) -> None:
        """Finish what a failed move of the slots left to do, before anyone uses them."""
        with self._usage.exclusively("use the slots after a failed move", for_engine=for_engine):
            self._relayout.restore_guards()

    def unbind(self) -> None:
        """See `TierManager.unbind_engine`."""
        self._usage.unbind(lambda: int(self._residency.pins.sum()))

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep what goes wrong in a `with` block in `last_error`, and raise it."""
        try:
            yield
        except BaseException as error:
            self.last_error = error
            raise
