"""How large the tiers of one device are: what is kept free of it, the slots (L1) and the copies in RAM (L2).

    needs ─► with_kept_free ─► device_ledger ─┐ a device with memory of its own
    RAM ─────────────────────► _arena_in_ram ─┴─► L1 ─► host_pool ─► L2

Pure functions of numbers, for `expertier plan` and for tiers that are opened: each asks here, and nothing else computes
these sizes. `sizing_split.py` shares a model and a user's wishes out over several devices first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from expertier.errors import BudgetError
from expertier.planner.budget.allocate import LayerPlan, floor_bytes, full_bytes, plan_layers
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.ledger import DeviceLedger, DeviceNeeds, plan_device
from expertier.planner.budget.limited_by import LimitedBy
from expertier.planner.budget.shrink import shrink
from expertier.units import MIB, mib, mib_needed, round_up

HEADROOM_BYTES = 512 * MIB
"""Device memory that `auto` leaves to the driver, its kernels and the BLAS libraries."""

RAM_SHARE = 0.5
"""Share of the available RAM that `auto` takes at most, for L1 on the host device and for L2 on others.

The engine's dense weights, its key-value cache and the page cache, which is a tier of its own, live in the rest: a pool
that takes all of the RAM makes each of its misses a read from the disk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The sizes that the user set, in bytes; None stands for `auto`.

    `arena_bytes` is L1's size and `cap_bytes` the most that L1 may have; `pool_bytes` is L2's size, and `share` the
    part of all expert bytes that `auto` takes. `headroom_bytes` of a device are left to the driver, and `reserve_bytes`
    are left free.
    """

    arena_bytes: int | None = None
    cap_bytes: int | None = None
    pool_bytes: int | None = None
    share: float = 0.25
    headroom_bytes: int | None = None
    reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that one device holds: what its layers ask of slots, and what copies of all experts take in RAM."""

    demands: Sequence[LayerDemand]
    copies_bytes: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """L2's budget, and what keeps it from being larger. A pool never fills beyond a copy of every expert."""

    budget_bytes: int
    limited_by: LimitedBy


@dataclass(frozen=True, slots=True)
class TierSizes:
    """L1's and L2's sizes; `ledger` says where a device's memory goes, where `auto` shared it out."""

    arena_bytes: int
    pool: PoolSize
    ledger: DeviceLedger | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SlabSlots:
    """Slots of a slab that may hold an engine's compute buffers below them.

    `quotas` are for the whole slab, `wide` for what a wide batch's buffers leave, and `narrow` for what a narrow
    batch's leave.
    """

    quotas: LayerPlan
    wide: LayerPlan
    narrow: LayerPlan


def with_kept_free(needs: DeviceNeeds, wishes: Wishes) -> DeviceNeeds:
    """Return `needs` with the bytes of a device that are kept free whatever lies there: headroom and reserve."""
    return replace(
        needs,
        headroom=HEADROOM_BYTES if wishes.headroom_bytes is None else wishes.headroom_bytes,
        reserve=0 if wishes.reserve_bytes is None else wishes.reserve_bytes,
    )


def size_tiers(
    experts: Experts, wishes: Wishes, *, available_bytes: int, needs: DeviceNeeds | None = None
) -> TierSizes:
    """Return the sizes of both tiers. `available_bytes` is the RAM that may still be taken.

    Without `needs` the device is the host, where both tiers lie in RAM. There `auto` gives L1 the wished `share` of all
    expert bytes, at least the hard floor of one slot a layer and at most `RAM_SHARE` of `available_bytes`.

    With `needs` the device has memory of its own, and `auto` gives L1 what its ledger leaves. A size that the user set
    is taken as it is, without a look at what the device has left. L1 never gets more than a slot for every expert, nor
    more than the cap. Raises `BudgetError` below the hard floor.
    """
    demands = experts.demands
    full = full_bytes(demands)
    require_cap(demands, wishes.cap_bytes)
    ledger = None
    if wishes.arena_bytes is not None:
        require_arena(demands, wishes.arena_bytes)
        arena = wishes.arena_bytes
    elif needs is None:
        arena = _arena_in_ram(demands, wishes.share, available_bytes)
    else:
        ledger = device_ledger(experts, wishes, needs)
        arena = ledger.arena_bytes
    arena = min(arena, full, full if wishes.cap_bytes is None else wishes.cap_bytes)
    pool = host_pool(
        experts,
        wishes,
        available_bytes=available_bytes,
        holds_all=arena >= full,
        has_own_memory=needs is not None,
    )
    return TierSizes(arena, pool, ledger)


def device_ledger(
    experts: Experts, wishes: Wishes, needs: DeviceNeeds, *, computes_in_slab: bool = True
) -> DeviceLedger:
    """Share a device's memory out: headroom and reserve stay free, other consumers get their needs, and L1 the rest.

    `computes_in_slab` says whether an engine's compute buffers lie below the slots. Raises `BudgetError` as
    `plan_device` does, also where an arena that the user asked for does not fit.
    """
    ledger = plan_device(
        with_kept_free(needs, wishes),
        experts.demands,
        cap_bytes=wishes.cap_bytes,
        asked_bytes=wishes.arena_bytes,
    )
    return replace(ledger, computes_in_slab=computes_in_slab)


def host_pool(
    experts: Experts, wishes: Wishes, *, available_bytes: int, holds_all: bool, has_own_memory: bool
) -> PoolSize:
    """Return L2's size.

    A size that the user set is the budget. `auto` takes the wished share of the experts' copies, at most `RAM_SHARE` of
    the RAM that is available. It takes nothing on the host device, as a copy in RAM of what is in RAM serves no one;
    and nothing where L1 `holds_all` experts: none is ever evicted, so that a copy would be read once, while the slots
    fill.
    """
    copies = experts.copies_bytes
    if wishes.pool_bytes is not None:
        limited_by = LimitedBy.SLOTS if copies <= wishes.pool_bytes else LimitedBy.POOL
        return PoolSize(wishes.pool_bytes, limited_by)
    if not has_own_memory:
        return PoolSize(0, LimitedBy.POOL)
    if holds_all:
        return PoolSize(0, LimitedBy.SLOTS)
    bounds = {
        LimitedBy.SLOTS: copies,
        LimitedBy.POOL: int(wishes.share * copies),
        LimitedBy.RAM: int(available_bytes * RAM_SHARE),
    }
    limited_by = min(bounds, key=lambda limit: bounds[limit])  # the first of equal bounds
    return PoolSize(bounds[limited_by], limited_by)


def slab_slots(
    demands: Sequence[LayerDemand],
    *,
    arena_bytes: int,
    wide_bytes: int = 0,
    narrow_bytes: int = 0,
    alignment: int = 1,
    profile: npt.NDArray[np.generic] | None = None,
) -> SlabSlots:
    """Return the slots of a slab of `arena_bytes` and, below them, compute buffers of `wide_bytes`.

    The slots are planned for the whole slab (`profile` as `plan_layers` takes it), and every layer gives up the same
    share where a batch computes. A narrow batch's buffers take `narrow_bytes` of those of a wide one. The slab and its
    compute region are multiples of `alignment`. Raises `BudgetError` below one slot a layer.
    """
    wide_bytes = round_up(wide_bytes, alignment)
    quotas = plan_layers(demands, budget_bytes=arena_bytes + wide_bytes, profile=profile)
    if not wide_bytes:
        return SlabSlots(quotas, quotas, quotas)
    slab_bytes = round_up(arena_bytes + wide_bytes, alignment)
    wide = shrink(quotas.slots, demands, budget_bytes=arena_bytes)
    left = slab_bytes - round_up(narrow_bytes, alignment)
    return SlabSlots(quotas, wide, shrink(quotas.slots, demands, budget_bytes=left))


def require_arena(demands: Sequence[LayerDemand], arena_bytes: int) -> None:
    """Raise `BudgetError` where an arena that the user asked for has no room for one slot in each layer."""
    floor = floor_bytes(demands)
    if arena_bytes < floor:
        raise BudgetError(
            f"asked for {arena_bytes / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} "
            f"layers takes {mib(floor)}: set MOE_EXPERT_CACHE_MIB to at least {mib_needed(floor)}, or to "
            "`auto`"
        )


def require_cap(demands: Sequence[LayerDemand], cap_bytes: int | None) -> None:
    """Raise `BudgetError` where the cap that the user set leaves no room for one slot in each layer."""
    floor = floor_bytes(demands)
    if cap_bytes is not None and cap_bytes < floor:
        raise BudgetError(
            f"asked for at most {cap_bytes / MIB:.3f} MiB of expert slots, but one slot in each of {len(demands)} "
            f"layers takes {mib(floor)}: set MOE_POOL_CAP_MIB to at least {mib_needed(floor)}"
        )


def _arena_in_ram(demands: Sequence[LayerDemand], share: float, available_bytes: int) -> int:
    """Return what `auto` gives L1 on the host device. Raises `BudgetError` where RAM has no room for a slot a layer."""
    floor = floor_bytes(demands)
    most = int(available_bytes * RAM_SHARE)
    if most < floor:
        raise BudgetError(
            f"one expert slot in each of {len(demands)} layers takes {mib(floor)}; `auto` may take half "
            f"of the {mib(available_bytes)} of RAM available: free some, or set MOE_EXPERT_CACHE_MIB to "
            f"at least {mib_needed(floor)}"
        )
    wanted = sum(demand.fixed_bytes + int(share * demand.n_experts * demand.slot_bytes) for demand in demands)
    return min(max(wanted, floor), most)
