"""Tiers whose calls are interrupted at every instruction, and what has to be so after each."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import expertier as et
from expertier import interrupts
from expertier.hip.device import Device
from expertier.hip.host import HostDevice
from expertier.testing import FakeDevice, LayerShape, PatternSource, synthetic_table
from expertier.tiers.shared.layer_locks import LAYER_BYTES
from interruptions.interrupt_at import Interrupted, at_every_instruction, expertier_folders, standard_library

DEVICES: dict[str, Callable[[], Device]] = {"host": HostDevice, "fake": FakeDevice}

N_LAYERS, N_EXPERTS, N_SLOTS = 2, 8, 3
SOURCE = PatternSource()
TABLE = synthetic_table([LayerShape(n_experts=N_EXPERTS)] * N_LAYERS)

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LIMIT_S = 10.0
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@contextmanager
def default_handler() -> Iterator[None]:
    """Have Python's own handler of SIGINT: a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def config(*, pool_experts: int = 0, fill_threads: int = 0) -> et.TierConfig:
    """Return budgets of `N_SLOTS` slots a layer, and of about so many experts in the host pool."""
    slots = sum(demand.bytes_for(N_SLOTS) for demand in TABLE.layer_demands())
    block = max(layout.block_bytes for layout in TABLE.slot_layouts)
    return et.TierConfig(
        expert_cache_bytes=slots,
        host_pool_bytes=max(pool_experts * block, 1 << 16) if pool_experts else 0,
        fill_threads=fill_threads,
        fill_pool=False,
    )


@contextmanager
def open_tiers(device: Device, made: et.TierConfig) -> Iterator[et.TierManager]:
    """Open tiers on a device, and close both."""
    tiers = et.TierManager(TABLE, device=device, config=made, source=SOURCE)
    try:
        yield tiers
    finally:
        tiers.close()
        device.close()


def locks_of(root: object) -> list[Any]:
    """Return the Python locks that expertier's objects reach from `root`."""
    seen, locks, left = {id(root)}, [], [root]
    while left:
        found = left.pop()
        if isinstance(found, _LOCKS):
            locks.append(found)
            continue
        if isinstance(found, threading.Condition):  # whose other locks are those of threads that wait
            others = [found._lock]  # type: ignore[attr-defined]
        elif type(found).__module__.startswith("expertier") or isinstance(found, _CONTAINERS):
            others = gc.get_referents(found)
        else:
            continue
        for other in others:
            if id(other) not in seen:
                seen.add(id(other))
                left.append(other)
    return locks


def assert_no_lock_is_held(tiers: et.TierManager, locks: Iterable[Any], why: str) -> None:
    """Assert that all layers' locks are free, and so are `locks`."""
    libc = ctypes.PyDLL(None)
    for layer in range(N_LAYERS):
        mutex = ctypes.c_void_p(tiers._parts.locks.address + layer * LAYER_BYTES)
        assert libc.pthread_mutex_trylock(mutex) == 0, f"layer {layer}'s lock is held: {why}"
        libc.pthread_mutex_unlock(mutex)
    for lock in locks:
        if hasattr(lock, "_is_owned"):
            assert not lock._is_owned(), f"{lock} is held: {why}"
        else:
            assert lock.acquire(timeout=_LIMIT_S), f"{lock} is held: {why}"  # threads of the tiers' own may
            lock.release()


def assert_next_interrupt_is_raised(why: str) -> None:
    """Assert that handlers are back, and that nothing keeps interrupts out."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, why
    assert interrupts._MainThread.depth == 0, why
    assert not interrupts._MainThread.actions, why
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"a second interrupt was not raised: {why}")


def wrong_bytes(device: Device, lease: et.Lease) -> list[int]:
    """Return the experts of a lease whose slots have other bytes than the source."""
    group = lease.held
    assert group is not None
    if device.has_streams:
        device.synchronize()
    wrong = []
    for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
        for matrix, span in zip(
            TABLE.layers[lease.layer].matrices, TABLE.layers[lease.layer].spans(expert), strict=True
        ):
            view = lease.view(matrix.role)
            found = ctypes.string_at(view.address + slot * view.stride_bytes, span.n_bytes)
            if found != SOURCE.expected(span):
                wrong.append(expert)
    return wrong


def assert_sound(tiers: et.TierManager, locks: Iterable[Any], why: str) -> None:
    """Assert what has to be so after any call that was interrupted."""
    assert_no_lock_is_held(tiers, locks, why)
    assert_next_interrupt_is_raised(why)
    assert not tiers._usage.leases(), why
    assert not tiers._residency.pins.any(), f"pinned: {tiers._residency.pins.tolist()}: {why}"
    tiers.check_valid()


def interrupted_everywhere(
    device: Device,
    tiers: et.TierManager,
    call: Callable[[], Any],
    *,
    before: Callable[[], Any] = lambda: None,
    undo: Callable[[Interrupted], None] = lambda _: None,
    at: Iterable[int] | None = None,
) -> int:
    """Interrupt `call` at every instruction, or at those in `at`; return how many interrupts there were.

    `before` is called before each, and `undo` after each with what came of it: it gives back what a call that was
    complete has returned. After each nothing is held, and the tiers work.
    """
    locks = locks_of(tiers)
    assert len(locks) > 8, "not all of the tiers' locks were found"
    n = 0

    before()
    for found in at_every_instruction(call, [*expertier_folders(), *standard_library()], at=at):
        why = f"at instruction {found.nth}, {found.place}"
        assert isinstance(found.error, KeyboardInterrupt), f"{found.error!r} {why}"
        undo(found)
        found.error.__traceback__ = None
        assert_sound(tiers, locks, why)
        with tiers.acquire(0, [5, 6]) as lease:
            assert not wrong_bytes(device, lease), why
        before()
        n += 1
    return n
