"""The tiers of one model on one device.

    acquire ──► admission (policy, layer locks) ──► filler ──► host pool ─┬─ hit ───────────────────► slot
                                                                          └─ miss ► source ► block ─► slot

An engine's plugin takes admission's place: it makes the same policy calls under the same locks, and calls
`fill`. The boundary moves (`reserve_compute`) while nobody is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError, DeviceError
from expertier.hip.device import Device
from expertier.interrupts import (
    completing,
    deferring,
    interrupts_deferred,
    not_interrupted_at_entry,
    opening,
)
from expertier.planner.budget.allocate import LayerPlan
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds
from expertier.planner.budget.quotas import Proposal
from expertier.tiers.access.lease import Lease
from expertier.tiers.assemble import assemble
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine_use import EngineUse
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.fill.prefetcher import MAX_WAITING, Target
from expertier.tiers.fill.warm_start import fill_order, warm_fetches
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.leased_slots import LeasedSlots
from expertier.tiers.model.expert_ids import distinct, distinct_array
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.stats import TierStats
from expertier.tiers.slots.boundary import ComputeRegion
from expertier.tiers.tier_counts import check_parts, stats_of
from expertier.units import mib

I32 = npt.NDArray[np.int32]


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
        self._config = config = config if config is not None else TierConfig()
        self._table = table
        self._device = device
        self._has_streams = device.has_streams
        profile = profile if profile is not None else ModelProfile.of(config.profile, table)
        with ExitStack() as stores:
            parts = assemble(
                table,
                device,
                config,
                stores,
                source=source,
                needs=needs,
                profile=profile,
                share=share,
                compute_bytes=compute_bytes,
            )
            self._stores = stores.pop_all()
        self._parts = parts
        self._residency = parts.residency
        self._locks_address = parts.locks.address
        self._slab = parts.slab
        self._pool = parts.pool
        self._usage = parts.usage
        self._fences = parts.fences
        self._admission = parts.admission
        self._boundary = parts.boundary
        self._leased = LeasedSlots(parts)
        self.engine = EngineUse(parts)
        """What an engine that is bound to these tiers is told, and may ask for."""
        if profile.warm_uses is not None:
            self.warm_start(profile.warm_uses)
        fills = config.fill_pool
        if fills == "auto":  # a slot in host memory is as far from the page cache as a copy in L2 is
            fills = device.has_own_memory and config.fill_threads > 0
        if fills:
            self.fill_host_pool(profile.warm_uses)

    @property
    def config(self) -> TierConfig:
        """What was wished for, `auto` included."""
        return self._config

    @property
    def device(self) -> Device:
        """The device that holds L1."""
        return self._device

    @property
    def ledger(self) -> DeviceLedger | None:
        """Who takes the device's memory, where `auto` shared it out."""
        return self._parts.ledger

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
        lease = Lease(self._leased, layer, threading.get_ident(), stream, wanted, held)
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

    def require_no_leases_here(self, wish: str) -> None:
        """Raise `BusyError` where this thread's own leases hold slots that `wish` would wait for."""
        if self._usage.holds_slots(threading.get_ident()):
            raise BusyError(f"this thread holds leases: release them before you {wish}")

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
        if self._parts.engine_computes:
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
        self._parts.prefetcher.ask(
            layer, self._table.existing(layer, wanted), Target(into), n_asked=len(wanted)
        )

    @deferring
    def cancel_prefetches(self, layer: int | None = None) -> int:
        """Forget the prefetches that have not begun, of a layer or of all; return how many."""
        return self._parts.prefetcher.cancel(layer)

    @deferring
    def fill_host_pool(self, uses: npt.NDArray[np.generic] | None = None) -> None:
        """Have the host pool's free room filled from the file in the background, with whom no slot holds first.

        The most used experts come first where `uses` says who these are (as in `warm_start`), else the layers take
        turns. One expert at a time, while nobody waits for any and no prefetch waits; nothing is evicted for it. It
        pauses where there is no room, and an error of reading ends it with a warning (`pool_filling.py`).
        """
        self._parts.filling.start(fill_order(self._table.layers, uses))

    @deferring
    def drain(self) -> None:
        """Wait until no prefetch waits or runs, nor a filling of the host pool that nothing keeps from going on."""
        self._usage.require_not_forked()
        self._parts.workers.idle()

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
        return self._parts.rebalance.look(self.arena_bytes, weights)

    @deferring
    def rebalance(self) -> Proposal | None:
        """Between steps: give the layers other numbers of slots where observed demand says that this pays.

        Returns what the new quotas promise, in bytes a step, or None where all stays as it is: little was
        seen yet, the saving is not worth the move (`planner/budget/quotas.py`), or someone holds slots. The policy
        must keep heat, as LFU-decay does; with LRU nothing ever pays.
        """
        return self._parts.rebalance.move_if_it_pays(self.arena_bytes)

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
            self._parts.prefetcher.ask(layer, [expert], target, n_asked=1, limit=MAX_WAITING + len(fetches))
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
        self._parts.filling.look_again()

    def stats(self) -> TierStats:
        """Return what the tiers hold and have counted."""
        return stats_of(self._parts)

    def check_valid(self) -> None:
        """Assert all tiers' invariants, and that pins equal leases (I7); call it while nothing else runs."""
        check_parts(self._parts)

    @completing
    def close(self) -> None:
        """Free everything; nothing to do the second time. `BusyError` while leases or an engine are there.

        Prefetches that have not begun are forgotten, and the one that runs is waited for. An interrupt is raised when
        all is done. In a child of `os.fork` nothing is done: all of it is the parent's.
        """
        if self._usage.close():
            self._parts.filling.close()
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
            self.engine.restore_guards()

    def _groups(self, layer: int, experts: I32) -> tuple[I32, ...]:
        """Cut experts into groups that fit the layer's slots; with several, resident ones come first."""
        n_slots = self.slots[layer]
        if len(experts) > n_slots:
            self._admission.resident_first(layer, experts)
        return tuple(experts[i : i + n_slots] for i in range(0, len(experts), n_slots))
