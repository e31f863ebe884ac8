"""Calls of the tiers, to be interrupted at any of their instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import expertier as et
from expertier.planner.budget.allocate import plan_layers
from expertier.testing import FakeDevice
from interruptions.interrupt_at import at_every_instruction, expertier_folders, standard_library
from interruptions.interrupted_tiers import (
    DEVICES,
    N_EXPERTS,
    SOURCE,
    TABLE,
    assert_next_interrupt_is_raised,
    config,
    interrupted_everywhere,
    open_tiers,
)

FOLDERS = [*expertier_folders(), *standard_library()]
ALL = range(1, 1 << 20)
"""Every instruction."""


def nothing(_: object) -> None:
    """Do nothing."""


# ---- acquire and release


def hit(tiers: et.TierManager) -> None:
    with tiers.acquire(0, [5, 6]):
        pass


def release(tiers: et.TierManager) -> None:
    tiers.acquire(0, [5, 6]).release()


def miss(tiers: et.TierManager) -> None:
    with tiers.acquire(1, [0, 1]):
        pass


def groups(tiers: et.TierManager) -> None:
    with tiers.acquire(1, range(N_EXPERTS)) as lease:
        for _ in lease.groups:
            pass


def evict(tiers: et.TierManager) -> None:
    tiers.acquire(1, [5, 6, 7]).release()


def everywhere(
    device_name: str,
    made: et.TierConfig,
    call: Callable[[et.TierManager], Any],
    *,
    before: Callable[[et.TierManager], Any] = nothing,
    undo: Callable[[et.TierManager], Any] = nothing,
    at: Any = ALL,
) -> int:
    """Interrupt a call at the instructions in `at`; return how many interrupts there were."""
    device = DEVICES[device_name]()
    with open_tiers(device, made) as tiers:
        for _ in range(2):  # whatever is made at a first use
            before(tiers)
            call(tiers)
            undo(tiers)
        return interrupted_everywhere(
            device,
            tiers,
            lambda: call(tiers),
            before=lambda: before(tiers),
            undo=lambda _: undo(tiers),
            at=at,
        )


# ---- the rest


def prefetch(tiers: et.TierManager) -> None:
    tiers.prefetch(1, [0, 1, 2])
    tiers.prefetch(1, [3], into="l2")
    tiers.cancel_prefetches(0)
    tiers.drain()


def compute(tiers: et.TierManager) -> None:
    tiers.reserve_compute(4000)
    tiers.release_compute()
    tiers.lower_boundary()


def give_compute_back(tiers: et.TierManager) -> None:
    tiers.release_compute()
    tiers.lower_boundary()


def apply(tiers: et.TierManager) -> None:
    tiers.apply(plan_layers(TABLE.layer_demands(), budget_bytes=tiers.arena_bytes))
    tiers.rebalance()


def resize(tiers: et.TierManager) -> None:
    tiers.resize_host_pool(0)
    tiers.resize_host_pool(1 << 16)


def warm(tiers: et.TierManager) -> None:
    tiers.warm_start(np.arange(2 * N_EXPERTS).reshape(2, N_EXPERTS))
    tiers.fill_host_pool()
    tiers.drain()


def bind(tiers: et.TierManager) -> None:
    tiers.engine.bind()
    tiers.engine.unbind()


def fill(tiers: et.TierManager) -> None:
    """Fill a slot as an engine has it filled."""
    tiers.engine.bind()
    table, locks = tiers._residency, tiers._parts.locks.address
    held = np.array([-1, -1, 0], np.int32)
    try:
        assert (
            table.begin_held(
                locks, 1, np.array([0, 1], np.int32), held, np.zeros(2, np.int32), 0, waits=False
            )
            == 2
        )
        tiers.engine.fill(1, [0, 1], held[:-1])
        table.complete_held(locks, 1, held)
        table.release_held(locks, 1, held)
    finally:
        table.abort_held(locks, 1, held)
        tiers.engine.unbind()


def unbind(tiers: et.TierManager) -> None:
    tiers.engine.unbind()


OPERATIONS: dict[str, tuple[Callable[[et.TierManager], Any], ...]] = {
    "prefetch": (prefetch, evict, nothing),
    "compute": (compute, nothing, give_compute_back),
    "apply": (apply, nothing, nothing),
    "resize": (resize, nothing, nothing),
    "warm": (warm, evict, nothing),
    "bind": (bind, nothing, unbind),
    "fill": (fill, evict, unbind),
}


def opened_or_not(at: Any, fill_threads: int = 0) -> tuple[int, int]:
    """Interrupt opening at the instructions in `at`; return how many there were, and how many opened all the same."""
    n = opened = 0
    device = FakeDevice()
    tiers = object.__new__(et.TierManager)  # an interrupt may come when the constructor has ended

    def open_them() -> None:
        nonlocal tiers
        tiers = object.__new__(et.TierManager)
        tiers.__init__(  # type: ignore[misc]
            TABLE, device=device, config=config(pool_experts=4, fill_threads=fill_threads), source=SOURCE
        )

    for _ in range(2):
        open_them()
        tiers.close()
    for found in at_every_instruction(open_them, FOLDERS, at=at):
        assert isinstance(found.error, KeyboardInterrupt), f"{found.error!r} at {found.place}"
        if device.device_bytes:
            opened += 1
            hit(tiers)
            tiers.close()
        assert device.device_bytes == device.pinned_bytes == device.n_events == 0, found.place
        assert device.streams == (0,), found.place
        assert_next_interrupt_is_raised(found.place)
        n += 1
    tiers.close()
    device.close()
    return n, opened


def closed_at(at: Any) -> int:
    """Interrupt closing at the instructions in `at`; return how many there were."""
    n = 0
    device = FakeDevice()
    for nth in at:
        tiers = et.TierManager(TABLE, device=device, config=config(pool_experts=4), source=SOURCE)
        hit(tiers)
        left = list(at_every_instruction(tiers.close, FOLDERS, at=[nth]))
        assert device.device_bytes == device.pinned_bytes == device.n_events == 0, left
        assert device.streams == (0,), left
        if not left:
            break
        assert isinstance(left[0].error, KeyboardInterrupt), left
        assert_next_interrupt_is_raised(left[0].place)
        n += 1
    device.close()
    return n
