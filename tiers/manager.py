"""The tiers of one model on one device.

    acquire ──► admission (policy, layer locks) ──► filler ──► host pool ─┬─ hit ───────────────────► slot
                                                                          └─ miss ► source ► block ─► slot

A bound engine's plugin does admission's work itself: it makes the same policy calls under the same locks, and calls
`engine.fill` for misses. The boundary moves (`reserve_compute`) while no thread uses the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from expertier.errors import BusyError, DeviceError
from expertier.hip.device import Device
from expertier.interrupts import (
    completing,
    deferring,
    interrupts_deferred,
    opening,
)
from expertier.planner.budget.allocate import LayerPlan
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds
from expertier.planner.budget.quotas import Proposal
from expertier.tiers.access.lease import Lease
from expertier.tiers.assemble import assemble
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.use import EngineUse
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.fill.prefetcher import MAX_WAITING, Target
from expertier.tiers.fill.warm_start import fill_order, warm_fetches
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.leased_slots import LeasedSlots
from expertier.tiers.model.expert_ids import distinct, distinct_array
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.closed_by_with import ClosedByWith
from expertier.tiers.shared.stats import TierStats
from expertier.tiers.slots.boundary import ComputeRegion
from expertier.tiers.tier_counts import check_parts, stats_of
from expertier.units import mib

I32 = npt.NDArray[np.int32]


class TierManager(ClosedByWith):
    """Keeps the experts of one model in tiers and leases them. Thread-safe.

    L1 is a slab of slots on `device`, L2 is a pool of host memory, and behind both is the file, or any other
    `ByteSource`. At the start every layer gets the same number of slots. With a routing profile in `config`, each layer
    gets as many slots as follow from the profile, and the most used experts are fetched in the background.

    Locks: `usage.py`, `boundary.py`, `fill/workers.py`, `slots/fences.py` and `host_pool/pool.py` have one lock each,
    and `layer_locks.py` has one for each layer. No thread takes one of these locks while it holds another.
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
        completes_layers: bool = True,
    ) -> None:
        """Allocate the tiers. Without `source`, the manager opens the table's files, and closes them in `close`.

        On a device with memory of its own, `needs` says what an engine takes of it beside the experts
        (`device_needs.py`); an `auto` budget leaves that free. `compute_bytes`, which `needs` includes, are added to
        the slab for an engine's compute buffers, and lie below the slots. `tier_set.py` passes `profile`, the part of
        the config's profile for these layers, and `share`, what part of a model on several devices this manager holds.
        Where the set completes layers itself, once an engine is bound to all managers, it passes `completes_layers` as
        False.

        Raises `BudgetError` where the budget is below one slot for each layer, `DeviceError` where memory is missing,
        `SourceError` where a file is not the one that the table describes, and `ConfigError` where the profile cannot
        be read or is of another model. On an error nothing stays allocated.
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
        self.engine = EngineUse(parts, completes_layers=completes_layers)
        """What an engine that is bound to these tiers calls."""
        if profile.warm_uses is not None:
            self.warm_start(profile.warm_uses)
        fills = config.fill_pool
        if fills == "auto":  # off for slots in host memory: the page cache fills these as fast as L2 would
            fills = device.has_own_memory and config.fill_threads > 0
        if fills:
            self.fill_host_pool(profile.warm_uses)

    @property
    def config(self) -> TierConfig:
        """The config as the user gave it: `auto` is not replaced."""
        return self._config

    @property
    def device(self) -> Device:
        """The device that holds L1."""
        return self._device

    @property
    def ledger(self) -> DeviceLedger | None:
        """What every consumer takes of the device's memory; None where `auto` did not divide it (`resolve`)."""
        return self._parts.ledger

    @property
    def table(self) -> ExpertTable:
        """The model's experts."""
        return self._table

    @property
    def arena_bytes(self) -> int:
        """L1's budget in bytes: what a plan may use while nothing is reserved for computing."""
        return self._boundary.arena_bytes

    @property
    def slots(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self._slab.slots

    # ---- leases

    def acquire(self, layer: int, experts: Iterable[int], stream: int | None = None) -> Lease:
        """Bring experts of a layer into slots and hold them there until the lease is released.

        `experts` is any iterable of ints or integer array. Duplicates count once; without experts the lease has no
        groups. Where there are more experts than slots, they come in several groups (`Lease.groups`).

        On a device with streams, work that is queued on `stream` after this call finds the experts' bytes, and work
        that is queued there before the release may read them even after it; the host does not wait. Without a stream,
        the bytes are there when the call returns, and all reads must have ended before the release.

        Waits while other threads' leases hold slots that are needed. A thread that holds slots itself gets `BusyError`
        instead of a wait, because two such threads could wait for each other. Raises `IndexError` for a layer or an
        expert that the model does not have, and `SourceError` or `DeviceError` where a fill failed. After an error no
        expert is half-present, and the next call works.
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
        # From here on the lease notes all that is done, so that `Lease.abandon` can undo it after an interrupt.
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
        """Raise `BusyError` where the calling thread holds slots, for which the action `wish` would wait."""
        if self._usage.holds_slots(threading.get_ident()):
            raise BusyError(f"this thread holds leases: release them before you {wish}")

    # ---- computing

    @deferring
    def reserve_compute(self, n_bytes: int, *, stream: int | None = None) -> ComputeRegion:
        """Keep the slab's first `n_bytes` free of slots until `release_compute`; a smaller number changes nothing.

        Where more has to be free than before, the boundary moves at once: every layer gives up slots, and the hottest
        experts stay. After this call work on `stream` may write to the region; without a stream, any work may.
        Waits for the leases of other threads.

        Raises `BudgetError` where less than one slot for each layer would be left; `BusyError` where this thread holds
        leases, an engine is bound, or other threads' leases do not end within a minute; and `DeviceError`. Boundary and
        slots are then as before.
        """
        if self._parts.engine_computes:
            raise BusyError(
                f"asked for {mib(n_bytes)} to compute in, but these tiers' compute region is the engine's: make the "
                "tiers with MOE_SLAB_COMPUTE=0"
            )
        return self._boundary.reserve(n_bytes, stream)

    @deferring
    def release_compute(self, n_bytes: int = 0) -> None:
        """Note that only the slab's first `n_bytes` are still needed; no queued work may use more.

        The boundary moves down in a later `acquire`, when that pays (`boundary.py`); `lower_boundary` moves it now.
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
        """Fetch experts in the background, into unpinned slots (`into="l1"`) or into the host pool only (`"l2"`).

        This is only a hint: it does not wait, does not raise where an expert cannot be read, and takes no slot of a
        lease. Experts that the model does not have are left out.
        """
        self._usage.require_not_forked()
        wanted = distinct(experts)
        self._parts.prefetcher.ask(
            layer, self._table.existing(layer, wanted), Target(into), n_asked=len(wanted)
        )

    @deferring
    def cancel_prefetches(self, layer: int | None = None) -> int:
        """Drop the prefetches that have not begun, of one layer or of all layers; return how many they were."""
        return self._parts.prefetcher.cancel(layer)

    @deferring
    def fill_host_pool(self, uses: npt.NDArray[np.generic] | None = None) -> None:
        """Fill the host pool's free room from the file in the background, beginning with experts that have no slot.

        With `uses` (as in `warm_start`) the most used experts come first; without it the layers take turns. Experts are
        read one at a time, while no thread waits for experts and no prefetch waits, and none is evicted. The filling
        rests where there is no room, and an error of reading ends it with a warning (`pool_filling.py`).
        """
        self._parts.filling.start(fill_order(self._table.layers, uses))

    @deferring
    def drain(self) -> None:
        """Wait until no prefetch waits or runs, and the filling of the host pool pauses, rests or has ended."""
        self._usage.require_not_forked()
        self._parts.workers.idle()

    # ---- budgets and quotas

    @deferring
    def apply(self, plan: LayerPlan) -> None:
        """Give the layers the slots of `plan`, shrunk where memory is reserved for computing.

        The hottest experts stay in L1, as many as the new slots hold. Raises `BudgetError` where the plan does not fit
        the slab, `BusyError` as `reserve_compute` does, and `DeviceError`. Nothing has changed then.
        """
        self._boundary.apply(plan)

    @deferring
    def propose_quotas(self, weights: Sequence[float] | None = None) -> Proposal | None:
        """Return new quotas for `engine.move_boundary` where they pay by the observed demand; None where none do.

        `weights` has each layer's cost of a miss, relative to a miss that the engine waits for. Cheap between samples.
        """
        return self._parts.rebalance.look(self.arena_bytes, weights)

    @deferring
    def rebalance(self) -> Proposal | None:
        """Give the layers new numbers of slots where that pays by the observed demand; to be called between steps.

        Returns the new quotas with the bytes that they are expected to save in a step. Returns None where nothing
        changed: too little demand was observed, the saving is not worth the move (`planner/budget/quotas.py`), or
        leases or an engine are in the way. The policy must keep heat, as LFU-decay does; with LRU no change ever pays.
        """
        return self._parts.rebalance.move_if_it_pays(self.arena_bytes)

    @deferring
    def warm_start(self, uses: npt.NDArray[np.generic]) -> int:
        """Start from a routing profile: `uses` says how often each expert was used.

        Its shape is (number of layers, largest number of experts of a layer). The experts' heat is set from it, and the
        most used experts are fetched in the background: first into the slots, then, for those beyond the slots, into
        the host pool (`warm_start.py`). Returns how many experts are fetched. Raises `ValueError` for another shape,
        and `BusyError` as `apply` does.
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
        """Give L1 another budget. The slab's base and the memory reserved for computing stay the same.

        A smaller budget shrinks all layers in proportion; a larger one gives all layers the same number of slots
        (`apply` changes that). The hottest experts stay. Memory is taken and given back in chunks
        (`stats().l1.memory_bytes`). Only a slab in virtual memory (`MOE_SLAB_VMM=1`, on a GPU whose driver passes the
        probe) can change its size, up to a slot for every expert of the model.

        Raises `DeviceError` for any other slab, for a larger size, and where memory is missing; `BudgetError` where
        less than one slot for each layer would be left; and `BusyError` as `reserve_compute`. Nothing has changed then.
        """
        self._boundary.resize(n_bytes)

    @deferring
    def resize_host_pool(self, n_bytes: int) -> None:
        """Give the host pool another budget; memory above it is given back as soon as no fill uses it."""
        self._pool.resize(n_bytes)
        self._parts.filling.look_again()

    def stats(self) -> TierStats:
        """Return the sizes of the tiers now, and their counts so far."""
        return stats_of(self._parts)

    def check_valid(self) -> None:
        """Assert the invariants of all tiers, and that pins equal leases (I7). Nothing else may use the tiers."""
        check_parts(self._parts)

    @completing
    def close(self) -> None:
        """Free everything; a second call does nothing. Raises `BusyError` while there are leases or an engine is bound.

        Prefetches that have not begun are dropped, and running ones are waited for. An interrupt is raised after all is
        freed. In a child of `os.fork` nothing is done, because everything belongs to the parent.
        """
        if self._usage.close():
            self._parts.filling.close()
            self._free()

    def _free(self) -> None:
        """Free what is allocated, in `close` or after the constructor has failed."""
        self._stores.close()

    # ---- inside

    @deferring
    def _finish_moves(self) -> None:
        """Move the boundary down where that pays by now, and restore what a failed move has left."""
        self._boundary.lower(now=False)
        if self._slab.stale_guards:
            self.engine.restore_guards()

    def _groups(self, layer: int, experts: I32) -> tuple[I32, ...]:
        """Divide experts into groups that fit the layer's slots; where there are several, residents come first."""
        n_slots = self.slots[layer]
        if len(experts) > n_slots:
            self._admission.resident_first(layer, experts)
        return tuple(experts[i : i + n_slots] for i in range(0, len(experts), n_slots))
