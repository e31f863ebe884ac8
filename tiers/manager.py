"""The tiers of one model on one device.

    acquire ──► admission (policy, layer locks) ──► filler ──► host pool ─┬─ hit ───────────────────► slot
                                                                          └─ miss ► source ► block ─► slot

An engine's plugin takes admission's place: it makes the same policy calls under the same locks, and calls
`fill`. The boundary moves (`reserve_compute`) while nobody is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError, DeviceError
from expertier.hip.device import Device
from expertier.hip.gpu.slab_memory import open_slab_memory
from expertier.interrupts import (
    completing,
    deferring,
    interrupts_deferred,
    not_interrupted_at_entry,
    opening,
    raise_pending,
)
from expertier.planner.budget.allocate import LayerPlan, full_bytes
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.quotas import Proposal
from expertier.planner.budget.sizing import slab_slots
from expertier.planner.budget.sizing_split import ram_of_share
from expertier.planner.policy.repack import Survivors
from expertier.planner.policy.residency import Residency
from expertier.tiers.access.lease import Lease, MatrixView
from expertier.tiers.access.usage import Usage
from expertier.tiers.config.advice import advise
from expertier.tiers.config.budget import experts_by_size, resolve
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.binding import EngineBinding, EngineLayout
from expertier.tiers.engine.prefill_stream import resolve_stream_tokens
from expertier.tiers.engine.use import EngineUse
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.counted_source import CountedSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.fill.admission import Admission
from expertier.tiers.fill.demand_reads import DemandReads
from expertier.tiers.fill.filler import Filler
from expertier.tiers.fill.pool_filling import PoolFilling
from expertier.tiers.fill.prefetcher import MAX_WAITING, Prefetcher, Target
from expertier.tiers.fill.warm_start import fill_order, warm_fetches
from expertier.tiers.fill.workers import FillWorkers
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.model.expert_ids import distinct, distinct_array
from expertier.tiers.model.matrix import Role
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes
from expertier.tiers.shared.layer_locks import LayerLocks
from expertier.tiers.shared.stats import L1Stats, TierStats
from expertier.tiers.slots.boundary import Boundary, ComputeRegion
from expertier.tiers.slots.fences import SlotFences
from expertier.tiers.slots.moves import compile_moves
from expertier.tiers.slots.rebalance import Rebalance
from expertier.tiers.slots.relayout import Relayout
from expertier.tiers.slots.slab import Slab
from expertier.tiers.slots.transfer import Transfer
from expertier.units import mib, round_up

I32 = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class TierManager:
    """Keeps the experts of one model in tiers and lends them out. Thread-safe.

    L1 is a slab of slots on `device`, L2 a pool of host memory, and behind both the file (or any
    `ByteSource`). At the start every layer gets an equal number of slots of L1's budget; with a
    routing profile in `config`, as many as it says, and the most used experts are fetched in the background.

    Locks: `usage.py`, `boundary.py`, `fill/workers.py`, `slots/fences.py` and `host_pool/pool.py` have one each,
    `layer_locks.py` one a layer; nobody takes one of these while holding another.
    """

    _stores = ExitStack()

    @opening
    def __init__(
        self,
        table: ExpertTable,
        *,
        device: Device,
        config: TierConfig | None = None,
        source: ByteSource | None = None,
        needs: DeviceNeeds | None = None,
        profile: ModelProfile | None = None,
        share: PoolShare | None = None,
        compute_bytes: int = 0,
    ) -> None:
        """Allocate the tiers. Without `source`, the table's file is opened and closed again here.

        On a device with memory of its own, `needs` says what an engine takes of it beside the experts
        (`device_needs.py`), which `auto` then leaves to it. `compute_bytes` are added to the slab for an engine's
        compute buffers, and lie below the slots; they are among the needs. `profile` is what `config` names, of these
        layers, and `share` what this is of a model on several devices: for `tier_set.py`.

        Raises `BudgetError` below one slot a layer, `DeviceError` where memory is missing, `SourceError`
        where the file is not the one that the table describes, `ConfigError` where the profile cannot be read or
        is of another model. On an error nothing stays allocated.
        """
        config = config if config is not None else TierConfig()
        self._table = table
        self._device = device
        self._has_streams = device.has_streams
        self.stream_tokens = resolve_stream_tokens(config, device)
        """An engine's batches of so many tokens and more go through the prefill stream; 0: none do."""
        self.decode_gate = config.decode_gate
        """Whether an engine looks ids up on the device; `auto`: where that has been tried."""
        self.decode_capture = config.decode_capture
        """Whether an engine with device look-ups captures decode graphs; `auto`: where that has been tried."""
        self.decode_prefetch = config.decode_prefetch
        """How many layers ahead an engine with device look-ups prefetches experts; `auto`: as long as that pays."""
        self.follow_demand = config.follow_demand
        budgets = resolve(
            config,
            table,
            ram_of_share(available_bytes(), share.fraction if share is not None else 1),
            device_free_bytes=device.free_bytes() if device.has_own_memory else None,
            needs=needs,
        )
        self.ledger = budgets.ledger
        """Who takes the device's memory, where `auto` shared it out."""
        if budgets.ledger is not None:
            _log.info("%s", budgets.ledger.line())
        profile = profile if profile is not None else ModelProfile.of(config.profile, table)
        demands = table.layer_demands()
        compute_bytes = round_up(compute_bytes, RANGE_ALIGNMENT)
        slab_bytes = budgets.expert_cache_bytes + compute_bytes
        planned = slab_slots(
            demands,
            arena_bytes=budgets.expert_cache_bytes,
            wide_bytes=compute_bytes,
            alignment=RANGE_ALIGNMENT,
            profile=profile.plan_uses,
        )
        slots = planned.wide.slots
        layouts = table.slot_layouts
        self.engine_computes = compute_bytes > 0
        """Whether an engine's compute buffers lie in the slab."""
        self._residency = Residency([layer.n_experts for layer in table.layers], slots, config.policy)
        raise_pending()
        with ExitStack() as undo:
            self._locks = LayerLocks(table.n_layers)
            self._locks_address = self._locks.address
            undo.callback(self._locks.close)
            self._slab = Slab(
                device,
                layouts,
                slab_bytes,
                open_slab_memory(
                    device,
                    round_up(slab_bytes, RANGE_ALIGNMENT),
                    vmm=config.slab_vmm,
                    capacity_bytes=round_up(full_bytes(demands) + compute_bytes, RANGE_ALIGNMENT),
                ),
            )
            undo.callback(self._slab.close)
            self._slab.relayout(self._slab.plan(slots, compute_bytes), Survivors.none())
            self._copies = CopyDirectory([layer.n_experts for layer in table.layers])
            undo.callback(self._copies.close)
            self._pool = HostPool(
                device,
                budget_bytes=budgets.host_pool_bytes,
                largest_block_bytes=max(layout.block_bytes for layout in layouts),
                experts_by_size=experts_by_size(table),
                directory=self._copies,
                model=share.model if share is not None else None,
            )
            undo.callback(self._pool.close)
            if source is None:
                file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
                undo.callback(file.close)
                source = file
            self._fences = SlotFences(device)
            transfer = Transfer(device, self._slab, self._fences)
            undo.callback(transfer.close)
            undo.callback(self._fences.close)
            self._workers = FillWorkers(config.fill_threads)
            undo.callback(self._workers.close)
            self._stores = undo.pop_all()
        self._source = CountedSource(source)
        demand = DemandReads()
        self._filler = Filler(
            table.layers,
            layouts,
            self._pool,
            self._source,
            transfer,
            self._workers,
            demand,
            slots_are_host_memory=not device.has_own_memory,
        )
        self._usage = Usage()
        self._admission = Admission(
            self._residency, self._locks, self._serve_lease, self._usage.require_not_forked
        )
        self._relayout = Relayout(
            self._slab, self._residency, self._pool, self._fences, transfer.demand_stream
        )
        self._boundary = Boundary(
            self._slab,
            self._relayout,
            self._usage,
            demands,
            self._demand_bytes,
            slab_bytes,
            planned.quotas.slots,
        )
        self._prefetcher = Prefetcher(
            self._residency,
            self._locks,
            self._usage,
            self._workers,
            self._filler,
            self._pool,
            self._before_ready,
        )
        self._filling = PoolFilling(
            table.layers, self._residency, self._usage, self._workers, self._filler, self._pool, demand
        )
        self._engine = EngineUse(
            table,
            device,
            slab=self._slab,
            residency=self._residency,
            locks=self._locks,
            copies=self._copies,
            filler=self._filler,
            fences=self._fences,
            usage=self._usage,
            relayout=self._relayout,
            boundary=self._boundary,
            prefetcher=self._prefetcher,
            source=self._source,
            serve=self._serve,
        )
        self._rebalance = Rebalance(self._residency, self._boundary, demands)
        for line in advise(table, slots, budgets):
            _log.warning("%s: %s", table.path.name, line)
        self.completes_layers = True
        """Whether `bind_engine` calls `complete_layers`; else whoever binds several managers does, when all are."""
        if profile.warm_uses is not None:
            self.warm_start(profile.warm_uses)
        fills = config.fill_pool
        if fills == "auto":  # a slot in host memory is as far from the page cache as a copy in L2 is
            fills = device.has_own_memory and config.fill_threads > 0
        if fills:
            self.fill_host_pool(profile.warm_uses)

    @property
    def table(self) -> ExpertTable:
        """The model's experts."""
        return self._table

    @property
    def arena_bytes(self) -> int:
        """L1's budget: what a plan may use while nothing is reserved for computing."""
        return self._boundary.arena_bytes

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self._slab.slots

    # ---- leases

    def acquire(self, layer: int, experts: Iterable[int], stream: int | None = None) -> Lease:
        """Bring experts of a layer into slots and hold them there until the lease is released.

        `experts` is any sequence of ints or integer array; duplicates count once, and none at all is a lease
        without groups. More than the layer has slots come in several groups (`Lease.groups`).

        On a device with streams, work that is queued on `stream` from now on finds the experts' bytes, and
        what is queued there before the release may still read them after it; the host waits for neither.
        Without a stream the bytes are there when the call returns, and reads must be done at the release.

        Waits while others use what is needed; a thread that holds leases itself gets `BusyError` instead, as
        it might be waited for. Raises `IndexError` for a layer or an expert that the model does not have, and
        `SourceError` or `DeviceError` where a fill failed; nothing is half-present then, and the next call
        works.
        """
        if stream is not None and not self._has_streams:
            raise DeviceError(f"asked for stream {stream}: device {self._device.name} has none, leave it out")
        if self._boundary.pays_at is not None or self._slab.stale_guards:
            self._finish_moves()
        wanted = distinct_array(experts)
        if wanted is None:
            numbers = distinct(experts)
            self._table.check_experts(layer, numbers)
            wanted = np.array(numbers, np.int32)
        # From the moment that the lease is known, whatever an interrupt leaves half done is in it (`Lease.abandon`).
        held = np.zeros(len(wanted) + 1, np.int32)
        lease = Lease(self, layer, threading.get_ident(), stream, wanted, held)
        try:
            self._usage.add(lease)
            if not len(wanted) or self._residency.try_pin_hits(self._locks_address, layer, wanted, held) != 0:
                self._table.check_experts(layer, wanted.tolist())
                lease.open(self._groups(layer, wanted))
            elif self._has_streams:
                with interrupts_deferred():
                    self._fences.before_read(layer, held[:-1].tolist(), stream)
        except BaseException:
            lease.abandon()
            raise
        return lease

    def acquire_group(self, lease: Lease, experts: I32, held: I32) -> None:
        """Bring one group's experts into slots; for `Lease`."""
        self._admission.acquire(lease.layer, experts, held, lambda: not self._usage.holds_slots(lease.thread))
        if self._has_streams:
            self._fences.before_read(lease.layer, held[:-1].tolist(), lease.stream)

    def release_group(self, lease: Lease, held: I32) -> None:
        """Unpin a group's slots; for `Lease`."""
        if not self._has_streams:
            self._admission.release(lease.layer, held)
            return
        with interrupts_deferred():
            if held[-1]:
                self._fences.after_read(lease.layer, held[:-1].tolist(), lease.stream)
            self._admission.release(lease.layer, held)

    def abandon_group(self, lease: Lease, held: I32) -> None:
        """Unpin a group's slots that nobody has read; for `Lease`."""
        self._admission.release(lease.layer, held)

    def forget(self, lease: Lease) -> None:
        """Note that a lease has ended; for `Lease`."""
        self._usage.forget(lease)

    def matrix_view(self, layer: int, role: Role) -> MatrixView:
        """Return where a matrix of the layer's slots lies; for `Lease`."""
        for matrix, place in zip(self._table.layers[layer].matrices, self._slab.places(layer), strict=True):
            if matrix.role is role:
                shape = (matrix.ne0, matrix.ne1, self.slots[layer])
                return MatrixView(
                    self._slab.base + place.offset,
                    place.stride,
                    matrix.ggml_type,
                    shape,
                    matrix.expert_bytes,
                )
        roles = ", ".join(matrix.role for matrix in self._table.layers[layer].matrices)
        raise ValueError(f"asked for the {role} matrix of layer {layer}: it has {roles}")

    # ---- engines

    def bind_engine(self) -> EngineBinding:
        """Let an engine use the tiers; slots and addresses stay as they are until `unbind_engine`, or until the engine
        itself has the boundary moved (`move_boundary`).

        Raises `BusyError` when an engine is bound already.
        """
        compile_moves()
        bound = False
        try:
            with interrupts_deferred():
                self._engine.bind()
                bound = True
                if self._device.has_own_memory and self.completes_layers:
                    self.complete_layers()
                return self._engine.binding()
        except BaseException:
            if bound:
                self.unbind_engine()
            raise

    @property
    def compute_bytes(self) -> int:
        """How many bytes at the slab's base are free of slots now."""
        return self._slab.layout.compute_bytes

    @property
    def n_cut_layers(self) -> int:
        """How many layers would have a slot for every expert if nothing were kept free of slots, and have not."""
        return self._engine.n_cut_layers

    @property
    def last_error(self) -> BaseException | None:
        """What made the last fill, load or move of the bound engine fail; None since `bind_engine` where none did."""
        return self._engine.last_error

    @property
    def slots_are_sound(self) -> bool:
        """False after a move that failed, and could not be undone: the next one will try again before all else."""
        return not self._slab.stale_guards

    @property
    def most_compute_bytes(self) -> int:
        """How many can be: all but one slot a layer."""
        return self._boundary.most_bytes()

    @deferring
    def move_boundary(
        self,
        n_bytes: int,
        plan: LayerPlan | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Have the slab's first `n_bytes` free of slots and no more, for a bound engine that uses no slots meanwhile.

        With `plan` the layers get its slots, or their share of what is left. The hottest experts stay. Slots, addresses
        and tables are others afterwards: `engine_layout` has them. Waits for the leases of other threads. Raises as
        `reserve_compute` does; boundary and slots are as before then, but the tables, and who is in the slots, may not
        be.

        `meanwhile` is called when all of that is known, before the device is waited for, with everyone else kept out;
        not where nothing has to move.
        """
        self._engine.move_boundary(n_bytes, plan, meanwhile)

    def engine_layout(self) -> EngineLayout:
        """Return where the slots lie now, and which tables say who is in them, for a bound engine."""
        return self._engine.layout()

    @deferring
    def complete_layers(self) -> None:
        """Have layers with a slot for every expert fetch them all in the background: an engine then asks no more."""
        self._engine.complete_layers()

    @deferring
    def fill(self, layer: int, experts: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """Fill the slots that an engine's `begin` call chose for missing experts, with no layer's lock held.

        May be called from several threads at once. Raises what a read or a copy raises, and `ValueError` where
        `slots[i]` was not chosen for `experts[i]`; keeps it in `last_error`.
        """
        self._engine.fill(layer, experts, slots)

    @deferring
    def load(self, layer: int, experts: npt.ArrayLike, address: int) -> None:
        """Copy experts to device memory outside the slots, into a place of the prefill stream.

        Expert `e` lies there as slot `e` of a range of all experts would, from `address` on. L1 is neither used
        nor changed. May be called from several threads. Raises what a read or a copy raises, and keeps it in
        `last_error`.
        """
        self._engine.load(layer, experts, address)

    def read_back(self, layer: int, matrix: int, offset: int, target: memoryview) -> None:
        """Fill `target` with a piece of one of a layer's matrices, as the file has it: for what an engine reads back.

        `offset` counts through the matrix of all experts, one after another. L1 and L2 are neither used nor changed.
        May be called from several threads. Raises what a read raises, and keeps it in `last_error`.
        """
        self._engine.read_back(layer, matrix, offset, target)

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where this thread's own leases hold slots that `wish` would wait for."""
        if self._usage.holds_slots(threading.get_ident()):
            raise BusyError(f"this thread holds leases: release them before you {wish}")

    @deferring
    def unbind_engine(self) -> None:
        """End the engine's use; nothing to do when none is bound. `BusyError` while it still holds slots."""
        self._engine.unbind()

    # ---- computing

    @deferring
    def reserve_compute(self, n_bytes: int, *, stream: int | None = None) -> ComputeRegion:
        """Keep the slab's first `n_bytes` free of slots, until `release_compute`; never less than before.

        Moves the boundary at once where that is needed: every layer gives up slots, the hottest experts stay,
        and work that is queued on `stream` from now on may write to the region (without a stream, everyone
        may when the call returns). Waits for the leases of other threads.

        Raises `BudgetError` where less than one slot a layer would be left, `BusyError` while this thread
        holds leases, an engine is bound or others' leases do not end in time, and `DeviceError`; boundary and
        slots are then as before.
        """
        if self.engine_computes:
            raise BusyError(
                f"asked for {mib(n_bytes)} to compute in, where these tiers have an engine compute: make them with "
                "MOE_SLAB_COMPUTE=0"
            )
        return self._boundary.reserve(n_bytes, stream)

    @deferring
    def release_compute(self, n_bytes: int = 0) -> None:
        """Say that only the first `n_bytes` are still needed; nothing that is queued may use the others.

        The boundary goes down when that pays (`boundary.py`), at a later `acquire`; `lower_boundary` does it now.
        """
        self._boundary.release(n_bytes)

    @deferring
    def lower_boundary(self) -> bool:
        """Move the boundary down to what is still reserved, now; return whether it moved.

        Raises what `reserve_compute` raises.
        """
        return self._boundary.lower(now=True)

    # ---- prefetches

    @deferring
    def prefetch(self, layer: int, experts: Iterable[int], *, into: str = "l1") -> None:
        """Have experts fetched in the background, into slots that nobody needs or the host pool (`l2`) only.

        A hint: never waits, never raises where an expert cannot be had, and never takes a slot that is leased.
        What the model does not have is left out.
        """
        self._usage.require_not_forked()
        wanted = distinct(experts)
        self._prefetcher.ask(layer, self._table.existing(layer, wanted), Target(into), n_asked=len(wanted))

    @deferring
    def cancel_prefetches(self, layer: int | None = None) -> int:
        """Forget the prefetches that have not begun, of a layer or of all; return how many."""
        return self._prefetcher.cancel(layer)

    @deferring
    def fill_host_pool(self, uses: npt.NDArray[np.generic] | None = None) -> None:
        """Have the host pool's free room filled from the file in the background, with whom no slot holds first.

        The most used experts come first where `uses` says who these are (as in `warm_start`), else the layers take
        turns. One expert at a time, while nobody waits for any and no prefetch waits; nothing is evicted for it. It
        pauses where there is no room, and an error of reading ends it with a warning (`pool_filling.py`).
        """
        self._filling.start(fill_order(self._table.layers, uses))

    @deferring
    def drain(self) -> None:
        """Wait until no prefetch waits or runs, nor a filling of the host pool that nothing keeps from going on."""
        self._usage.require_not_forked()
        self._workers.idle()

    # ---- the whole

    @deferring
    def apply(self, plan: LayerPlan) -> None:
        """Give the layers the slots of `plan`, or their share of what is not reserved for computing.

        The hottest experts that the new slots hold stay in L1. Raises `BudgetError` when the plan does not
        fit the slab, `BusyError` as `reserve_compute` does, and `DeviceError`; nothing has changed then.
        """
        self._boundary.apply(plan)

    @deferring
    def propose_quotas(self, weights: Sequence[float] | None = None) -> Proposal | None:
        """Return other numbers of slots where observed demand says that they pay, for `move_boundary`; None: none do.

        `weights` are what a miss of each layer costs, in terms of one that is waited for. Cheap between samples.
        """
        return self._rebalance.look(self.arena_bytes, weights)

    @deferring
    def rebalance(self) -> Proposal | None:
        """Between steps: give the layers other numbers of slots where observed demand says that this pays.

        Returns what the new quotas promise, in bytes a step, or None where all stays as it is: little was
        seen yet, the saving is not worth the move (`planner/budget/quotas.py`), or someone holds slots. The policy
        must keep heat, as LFU-decay does; with LRU nothing ever pays.
        """
        return self._rebalance.move_if_it_pays(self.arena_bytes)

    @deferring
    def warm_start(self, uses: npt.NDArray[np.generic]) -> int:
        """Begin with a routing profile: `uses` of every expert, shape (layers, most experts of a layer).

        The experts' heat is taken from it, and the most used ones are fetched in the background: into the slots,
        every layer's first one first, and then into the host pool what slots have no room for (`warm_start.py`).
        Returns how many were asked for; raises `ValueError` for another shape and `BusyError` as `apply` does.
        """
        with self._usage.exclusively("take the heat of a profile"):
            self._residency.seed_heat(uses)
        pool_bytes = self._pool.stats().budget_bytes
        fetches = warm_fetches(uses, self.slots, self._table.slot_layouts, pool_bytes=pool_bytes)
        for layer, expert, target in fetches:
            self._prefetcher.ask(layer, [expert], target, n_asked=1, limit=MAX_WAITING + len(fetches))
        return len(fetches)

    @deferring
    def resize_arena(self, n_bytes: int) -> None:
        """Give L1 another budget; the slab's base stays, and what of it is reserved for computing.

        A smaller one shrinks all layers in proportion, a larger one gives them equal slots (`apply` for others);
        the hottest experts stay. Memory is taken and given back in chunks (`stats().l1.memory_bytes`). Only a slab in
        virtual memory (`MOE_SLAB_VMM=1`, on a GPU whose driver passes the probe) can change its size, up to a slot
        for every expert of the model.

        Raises `DeviceError` for any other slab, beyond that size, and where memory is missing; `BudgetError` below
        one slot a layer above what is reserved; and `BusyError` as `reserve_compute` does. Nothing has changed then.
        """
        self._boundary.resize(n_bytes)

    @deferring
    def resize_host_pool(self, n_bytes: int) -> None:
        """Give the host pool another budget; what is above it is given back as soon as no fill uses it."""
        self._pool.resize(n_bytes)
        self._filling.look_again()

    def stats(self) -> TierStats:
        """Return what the tiers hold and have counted."""
        totals = self._residency.totals()
        layout = self._slab.layout
        l1 = L1Stats(
            budget_bytes=self.arena_bytes,
            used_bytes=layout.used_bytes,
            compute_bytes=layout.compute_bytes,
            rounding_bytes=layout.rounding_bytes,
            memory_bytes=self._slab.memory_bytes,
            slots=sum(self._slab.slots),
            hits=totals["hits"],
            misses=totals["misses"],
            evictions=totals["evictions"],
            bytes_in=self._bytes_of(self._residency.fills_by_layer()),
        )
        return TierStats(
            l1,
            self._pool.stats(),
            self._source.stats(),
            self._relayout.stats(),
            self._prefetcher.stats(
                self._bytes_of(self._residency.by_layer("prefetches_useful")),
                self._bytes_of(self._residency.by_layer("prefetches_wasted")),
            ),
        )

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
        totals = self._residency.totals()
        misses, filled, prefetched = stats.l1.misses, totals["fills"], totals["prefetches"]
        assert filled <= misses + prefetched, (
            f"{filled} fills for {misses} misses and {prefetched} prefetches"
        )
        if not self.stream_tokens:  # the prefill stream asks L2, too, and never L1
            # An engine's prefetches are not asked for here; those that it gives up end as aborts.
            asked = misses + stats.prefetch.asked + prefetched + totals["aborts"]
            assert stats.l2.hits + stats.l2.misses <= asked, "L2 was asked more often than L1 missed"

    @completing
    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are there.

        Prefetches that have not begun are forgotten, and the one that runs is waited for. An interrupt is raised when
        all is done. In a child of `os.fork` nothing is done: all of it is the parent's.
        """
        if self._usage.close():
            self._filling.close()
            self._free()

    def _free(self) -> None:
        """Free what is allocated; for `close`, and where opening fails."""
        self._stores.close()

    @not_interrupted_at_entry
    def __enter__(self) -> Self:
        """Return the manager itself."""
        return self

    @not_interrupted_at_entry
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

    @deferring
    def _finish_moves(self) -> None:
        """Do what moves of the boundary have left to do."""
        self._boundary.lower(now=False)
        if self._slab.stale_guards:
            self._engine.restore_guards()

    def _serve(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of missing experts; what they evicted becomes the youngest in the pool."""
        self._pool.touch((layer, expert) for expert in self._residency.experts_evicted_by(layer, slots))
        self._filler.fill(layer, experts.tolist(), slots.tolist())

    def _serve_lease(self, layer: int, experts: I32, slots: I32) -> None:
        """Fill the slots of a lease's missing experts."""
        self._serve(layer, experts, slots)
        self._before_ready(layer, slots)

    def _before_ready(self, layer: int, slots: I32) -> None:
        """Have the bytes in the slots before they count as READY, where an engine would believe that (I8).

        A lease has its stream wait for copies that are queued; an engine reads what is READY at once.
        """
        if self._usage.bound:
            self._fences.before_read(layer, slots.tolist(), None)

    def _demand_bytes(self) -> int:
        """Return the bytes that L1's misses have cost so far."""
        return self._bytes_of(self._residency.by_layer("misses"))

    def _bytes_of(self, experts_by_layer: Sequence[int]) -> int:
        layers = self._table.layers
        return sum(n * layer.expert_bytes for n, layer in zip(experts_by_layer, layers, strict=True))

    def _groups(self, layer: int, experts: I32) -> tuple[I32, ...]:
        """Cut experts into groups that fit the layer's slots; with several, resident ones come first."""
        n_slots = self.slots[layer]
        if len(experts) > n_slots:
            self._admission.resident_first(layer, experts)
        return tuple(experts[i : i + n_slots] for i in range(0, len(experts), n_slots))
