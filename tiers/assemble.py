"""Makes the tiers of one device: computes their sizes, allocates the stores, and connects what works on them.

    config, table, device ─► budgets ─► plan ─► slab, host pool, file ─► fills, moves, prefetches

It runs once, when the tiers are opened.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from expertier.hip.device import Device
from expertier.hip.gpu.slab_memory import open_slab_memory
from expertier.interrupts import raise_pending
from expertier.planner.budget.allocate import full_bytes
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds
from expertier.planner.budget.sizing import slab_slots
from expertier.planner.budget.sizing_split import ram_of_share
from expertier.planner.policy.repack import Survivors
from expertier.planner.policy.residency import Residency
from expertier.tiers.access.usage import Usage
from expertier.tiers.config.advice import advise
from expertier.tiers.config.budget import experts_by_size, resolve
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.byte_source import ByteSource
from expertier.tiers.file.counted_source import CountedSource
from expertier.tiers.file.source import FileSource
from expertier.tiers.fill.admission import Admission
from expertier.tiers.fill.demand_reads import DemandReads
from expertier.tiers.fill.filler import Filler
from expertier.tiers.fill.misses import MissServer
from expertier.tiers.fill.pool_filling import PoolFilling
from expertier.tiers.fill.prefetcher import Prefetcher
from expertier.tiers.fill.workers import FillWorkers
from expertier.tiers.host_pool.copy_directory import CopyDirectory
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.host_pool.pool_share import PoolShare
from expertier.tiers.model.profile import ModelProfile
from expertier.tiers.model.slot_layout import RANGE_ALIGNMENT
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shared.host_memory import available_bytes
from expertier.tiers.shared.layer_locks import LayerLocks
from expertier.tiers.slots.boundary import Boundary
from expertier.tiers.slots.fences import SlotFences
from expertier.tiers.slots.rebalance import Rebalance
from expertier.tiers.slots.relayout import Relayout
from expertier.tiers.slots.slab import Slab
from expertier.tiers.slots.transfer import Transfer
from expertier.units import round_up

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The parts of one device's tiers: what was asked for, the stores, and the objects that work on the stores."""

    table: ExpertTable
    device: Device
    config: TierConfig
    ledger: DeviceLedger | None
    engine_computes: bool

    residency: Residency
    locks: LayerLocks
    slab: Slab
    copies: CopyDirectory
    pool: HostPool
    source: CountedSource

    usage: Usage
    fences: SlotFences
    transfer: Transfer
    workers: FillWorkers
    filler: Filler
    misses: MissServer
    admission: Admission
    prefetcher: Prefetcher
    filling: PoolFilling
    relayout: Relayout
    boundary: Boundary
    rebalance: Rebalance


def assemble(
    table: ExpertTable,
    device: Device,
    config: TierConfig,
    stores: ExitStack,
    *,
    source: ByteSource | None,
    needs: DeviceNeeds | None,
    profile: ModelProfile,
    share: PoolShare | None,
    compute_bytes: int,
) -> Assembly:
    """Allocate the tiers of `table` on `device`, and connect their parts; the arguments are those of `TierManager`.

    As soon as a store is allocated, the function that frees it is added to `stores`; so closing `stores` frees
    everything, even where this raises half-way. Interrupts must be deferred. Raises what `TierManager` raises.
    """
    budgets = resolve(
        config,
        table,
        ram_of_share(available_bytes(), share.fraction if share is not None else 1),
        device_free_bytes=device.free_bytes() if device.has_own_memory else None,
        needs=needs,
    )
    if budgets.ledger is not None:
        _log.info("%s", budgets.ledger.line())
    demands = table.layer_demands()
    layouts = table.slot_layouts
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
    experts = [layer.n_experts for layer in table.layers]
    residency = Residency(experts, slots, config.policy)
    raise_pending()
    locks = LayerLocks(table.n_layers)
    stores.callback(locks.close)
    memory = open_slab_memory(
        device,
        round_up(slab_bytes, RANGE_ALIGNMENT),
        vmm=config.slab_vmm,
        capacity_bytes=round_up(full_bytes(demands) + compute_bytes, RANGE_ALIGNMENT),
    )
    slab = Slab(device, layouts, slab_bytes, memory)
    stores.callback(slab.close)
    slab.relayout(slab.plan(slots, compute_bytes), Survivors.none())
    copies = CopyDirectory(experts)
    stores.callback(copies.close)
    pool = HostPool(
        device,
        budget_bytes=budgets.host_pool_bytes,
        largest_block_bytes=max(layout.block_bytes for layout in layouts),
        experts_by_size=experts_by_size(table),
        directory=copies,
        model=share.model if share is not None else None,
    )
    stores.callback(pool.close)
    if source is None:
        file = FileSource(table.files, config.file_mode, working_set_bytes=table.expert_bytes_total)
        stores.callback(file.close)
        source = file
    fences = SlotFences(device)
    transfer = Transfer(device, slab, fences)
    stores.callback(transfer.close)
    stores.callback(fences.close)
    workers = FillWorkers(config.fill_threads)
    stores.callback(workers.close)

    counted = CountedSource(source)
    demand = DemandReads()
    usage = Usage()
    filler = Filler(
        table.layers,
        layouts,
        pool,
        counted,
        transfer,
        workers,
        demand,
        slots_are_host_memory=not device.has_own_memory,
    )
    misses = MissServer(residency, pool, filler, fences, usage)
    relayout = Relayout(slab, residency, pool, fences, transfer.demand_stream)

    def bytes_missed() -> int:
        return table.bytes_of(residency.by_layer("misses"))

    boundary = Boundary(slab, relayout, usage, demands, bytes_missed, slab_bytes, planned.quotas.slots)
    assembly = Assembly(
        table=table,
        device=device,
        config=config,
        ledger=budgets.ledger,
        engine_computes=compute_bytes > 0,
        residency=residency,
        locks=locks,
        slab=slab,
        copies=copies,
        pool=pool,
        source=counted,
        usage=usage,
        fences=fences,
        transfer=transfer,
        workers=workers,
        filler=filler,
        misses=misses,
        admission=Admission(residency, locks, misses.serve_lease, usage.require_not_forked),
        prefetcher=Prefetcher(residency, locks, usage, workers, filler, pool, misses.before_ready),
        filling=PoolFilling(table.layers, residency, usage, workers, filler, pool, demand),
        relayout=relayout,
        boundary=boundary,
        rebalance=Rebalance(residency, boundary, demands),
    )
    for line in advise(table, slots, budgets):
        _log.warning("%s: %s", table.path.name, line)
    return assembly
