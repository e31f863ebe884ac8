"""The tiers of one model on one device.

    acquire ──► admission (policy, layer locks) ──► filler ──► host pool ─┬─ hit ───────────────────► slot
                                                                          └─ miss ► source ► block ─► slot

An engine's plugin takes admission's place: it makes the same policy calls under the same locks, and calls
`fill`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError, DeviceError
from expertier.hip.device import Device
from expertier.planner.allocate import LayerPlan, plan_layers
from expertier.planner.residency import Residency
from expertier.tiers.admission import Admission
from expertier.tiers.advice import advise
from expertier.tiers.budget import resolve
from expertier.tiers.byte_source import ByteSource
from expertier.tiers.config import TierConfig
from expertier.tiers.counted_source import CountedSource
from expertier.tiers.engine_binding import EngineBinding, bound_layer
from expertier.tiers.expert_ids import distinct
from expertier.tiers.file_source import FileSource
from expertier.tiers.filler import Filler
from expertier.tiers.host_memory import available_bytes
from expertier.tiers.host_pool import HostPool
from expertier.tiers.layer_locks import LayerLocks
from expertier.tiers.lease import Lease, MatrixView, Part
from expertier.tiers.matrix import Role
from expertier.tiers.slab import Slab
from expertier.tiers.stats import L1Stats, TierStats
from expertier.tiers.table import ExpertTable
from expertier.tiers.transfer import Transfer
from expertier.tiers.usage import Usage

I32 = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class TierManager:
    """Keeps the experts of one model in tiers and lends them out. Thread-safe.

    L1 is a slab of slots on `device`, L2 a pool of host memory, and behind both the file (or any
    `ByteSource`). At the start every layer gets an equal number of slots of L1's budget.

    Locks: `usage.py` and `host_pool.py` have one each, `layer_locks.py` one a layer; nobody
    takes one of these while holding another.
    """

    def __init__(
        self,
        table: ExpertTable,
        *,
        device: Device,
        config: TierConfig | None = None,
        source: ByteSource | None = None,
    ) -> None:
        """Allocate the tiers. Without `source`, the table's file is opened and closed again here.

        Raises `BudgetError` below one slot a layer, `DeviceError` where memory is missing, `SourceError`
        where the file is not the one that the table describes. On an error nothing stays allocated.
        """
        config = config if config is not None else TierConfig()
        self._table = table
        self._device = device
        budgets = resolve(config, table, available_bytes())
        self._arena_bytes = budgets.expert_cache_bytes
        plan = plan_layers(table.layer_demands(), budget_bytes=self._arena_bytes)
        layouts = table.slot_layouts
        self._residency = Residency([layer.n_experts for layer in table.layers], plan.slots, config.policy)
        with ExitStack() as undo:
            self._locks = LayerLocks(table.n_layers)
            undo.callback(self._locks.close)
            self._slab = Slab(device, layouts, self._arena_bytes)
            undo.callback(self._slab.close)
            self._slab.apply(plan.slots)
            self._pool = HostPool(
                device,
                budget_bytes=budgets.host_pool_bytes,
                largest_block_bytes=max(layout.block_bytes for layout in layouts),
            )
            undo.callback(self._pool.close)
            if source is None:
                file = FileSource(table.files)
                undo.callback(file.close)
                source = file
            self._stores = undo.pop_all()
        self._source = CountedSource(source)
        transfer = Transfer(device, self._slab)
        self._filler = Filler(table.layers, layouts, self._pool, self._source, transfer)
        self._admission = Admission(self._residency, self._locks, self._serve)
        for line in advise(table, plan.slots, budgets):
            _log.warning("%s: %s", table.path.name, line)
        self.last_error: BaseException | None = None
        """What made the last engine fill fail; set by `fill`, cleared by whoever reports it."""
        self._usage = Usage()

    @property
    def table(self) -> ExpertTable:
        """The model's experts."""
        return self._table

    @property
    def arena_bytes(self) -> int:
        """L1's budget: what a plan may use."""
        return self._arena_bytes

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self._slab.slots

    # ---- leases

    def acquire(self, layer: int, experts: Iterable[int], stream: int | None = None) -> Lease:
        """Bring experts of a layer into slots and hold them there until the lease is released.

        `experts` is any sequence of ints or integer array; duplicates count once, and none at all is a lease
        without parts. More than the layer has slots come in several parts (`Lease.parts`). `stream` is for
        devices that have some; the host has none.

        Waits while others use what is needed; a thread that holds leases itself gets `BusyError` instead, as
        it might be waited for. Raises `IndexError` for a layer or an expert that the model does not have, and
        `SourceError` or `DeviceError` where a fill failed; nothing is half-present then, and the next call
        works.
        """
        if stream is not None and not self._device.has_streams:
            raise DeviceError(f"asked for stream {stream}: device {self._device.name} has none, leave it out")
        wanted = distinct(experts)
        self._table.check_experts(layer, wanted)
        lease = Lease(self, layer, threading.get_ident())
        try:
            self._usage.add(lease)
            lease.open(self._groups(layer, np.array(wanted, np.int32)))
        except BaseException:
            self._usage.forget(lease)
            raise
        return lease

    def take_part(self, lease: Lease, experts: I32) -> Part:
        """Bring one part's experts into slots; for `Lease`."""
        slots = self._admission.take(lease.layer, experts, lambda: not self._usage.holds_slots(lease.thread))
        return Part(experts, slots)

    def drop_part(self, lease: Lease, part: Part) -> None:
        """Unpin a part's slots; for `Lease`."""
        self._admission.drop(lease.layer, part.slots)

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended; for `Lease`."""
        self._usage.forget(lease)

    def matrix_view(self, layer: int, role: Role) -> MatrixView:
        """Return where a matrix of the layer's slots lies; for `Lease`."""
        for matrix, place in zip(self._table.layers[layer].matrices, self._slab.places(layer), strict=True):
            if matrix.role is role:
                shape = (matrix.ne0, matrix.ne1, self.slots[layer])
                return MatrixView(self._slab.base + place.offset, place.stride, matrix.ggml_type, shape)
        roles = ", ".join(matrix.role for matrix in self._table.layers[layer].matrices)
        raise ValueError(f"asked for the {role} matrix of layer {layer}: it has {roles}")

    # ---- engines

    def bind_engine(self) -> EngineBinding:
        """Let an engine use the tiers; slots and addresses stay as they are until `unbind_engine`.

        Raises `BusyError` when an engine is bound already.
        """
        self._usage.bind()
        self.last_error = None
        return EngineBinding(
            slab_base=self._slab.base,
            slab_bytes=self._slab.n_bytes,
            directory_address=self._residency.directory_address,
            locks_address=self._locks.address,
            layers=tuple(
                bound_layer(layer, n_slots, self._slab.places(number))
                for number, (layer, n_slots) in enumerate(zip(self._table.layers, self.slots, strict=True))
            ),
        )

    def fill(self, layer: int, experts: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """Fill the slots that an engine's `begin` call chose for missing experts, with no layer's lock held.

        May be called from several threads at once. Raises what a read or a copy raises, and `ValueError` where
        `slots[i]` was not chosen for `experts[i]`; keeps it in `last_error`.
        """
        try:
            with self._usage.engine_fill():
                wanted, chosen = np.asarray(experts, np.int32), np.asarray(slots, np.int32)
                if not self._residency.is_chosen(layer, wanted, chosen):
                    raise ValueError(
                        f"asked to fill slots {chosen.tolist()} of layer {layer} with experts {wanted.tolist()}: "
                        "`begin` did not choose them for these, or they are complete"
                    )
                self._serve(layer, wanted, chosen)
        except BaseException as error:
            self.last_error = error
            raise

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where this thread's own leases hold slots that `wish` would wait for."""
        if self._usage.holds_slots(threading.get_ident()):
            raise BusyError(f"this thread holds leases: release them before you {wish}")

    def unbind_engine(self) -> None:
        """End the engine's use; nothing to do when none is bound. `BusyError` while it still holds slots."""
        self._usage.unbind(lambda: int(self._residency.pins.sum()))

    # ---- the whole

    def apply(self, plan: LayerPlan) -> None:
        """Give the layers the slots of `plan`. L1 starts empty again; the pool keeps its copies.

        Raises `BudgetError` when the plan does not fit, and `BusyError` while leases are live or an engine is
        bound; nothing has changed then.
        """
        with self._usage.exclusively("apply a plan"):
            before = self._slab.slots
            self._slab.check_fits(plan.slots)
            residents = [
                (layer, expert)
                for layer in range(self._table.n_layers)
                for expert in self._residency.residents(layer)
            ]
            self._residency.resize(plan.slots)
            try:
                self._slab.apply(plan.slots)
            except BaseException:
                self._residency.resize(before)
                raise
        self._pool.refresh(residents)

    def stats(self) -> TierStats:
        """Return what the tiers hold and have counted."""
        totals = self._residency.totals()
        fills = self._residency.fills_by_layer()
        l1 = L1Stats(
            budget_bytes=self._arena_bytes,
            used_bytes=self._slab.used_bytes,
            slots=sum(self._slab.slots),
            hits=totals["hits"],
            misses=totals["misses"],
            evictions=totals["evictions"],
            bytes_in=sum(n * layer.expert_bytes for n, layer in zip(fills, self._table.layers, strict=True)),
        )
        return TierStats(l1, self._pool.stats(), self._source.stats())

    def check_valid(self) -> None:
        """Assert all tiers' invariants, and that pins equal leases (I7); call it while nothing else runs."""
        self._slab.check_valid()
        self._pool.check_valid()
        self._residency.check_valid()
        assert tuple(self._residency.n_slots.tolist()) == self._slab.slots, "tables and slab differ in slots"
        leases = self._usage.leases()
        for layer, n_slots in enumerate(self._slab.slots):
            expected = [0] * n_slots
            for lease in leases:
                if lease.layer == layer and lease.held is not None:
                    owners = self._residency.residents(layer)
                    for expert, slot in zip(
                        lease.held.experts.tolist(), lease.held.slots.tolist(), strict=True
                    ):
                        expected[slot] += 1
                        assert owners.get(expert) == slot, (
                            f"layer {layer}: leased expert {expert} left slot {slot}"
                        )
            pins = self._residency.pins_of(layer)
            assert pins == expected or self._usage.bound, f"layer {layer}: pins {pins}, leases {expected}"
        stats = self.stats()
        filled = self._residency.totals()["fills"]
        assert filled <= stats.l1.misses, f"{filled} fills for {stats.l1.misses} misses"
        assert stats.l2.hits + stats.l2.misses <= stats.l1.misses, "L2 was asked more often than L1 missed"

    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are there."""
        if self._usage.close():
            self._stores.close()

    def __enter__(self) -> Self:
        """Return the manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where that is refused and an error is on its way already, the error gets a note of it."""
        try:
            self.close()
        except BusyError as busy:
            if error is None:
                raise
            error.add_note(f"the tiers stay allocated: {busy}")

    # ---- inside

    def _serve(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of missing experts; what they evicted becomes the youngest in the pool."""
        self._pool.refresh((layer, expert) for expert in self._residency.evicted_from(layer, slots))
        self._filler.fill(layer, experts.tolist(), slots.tolist())

    def _groups(self, layer: int, experts: I32) -> tuple[I32, ...]:
        """Cut experts into parts that fit the layer's slots; with several, resident ones come first."""
        n_slots = self.slots[layer]
        if len(experts) > n_slots:
            self._admission.resident_first(layer, experts)
        return tuple(experts[i : i + n_slots] for i in range(0, len(experts), n_slots))
