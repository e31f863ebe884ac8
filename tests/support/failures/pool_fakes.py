"""What the tests of the host pool put around it: an allocator without memory, and queued copies done by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from expertier.errors import DeviceError
from expertier.hip.faults.plan import FaultPlan
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.pool import HostPool
from expertier.units import round_up

PAGE = 4096


def whole_pages(n_bytes: int) -> int:
    """What an allocator takes that maps pages."""
    return round_up(n_bytes, PAGE)


def powers_of_two(n_bytes: int) -> int:
    """What an allocator takes that rounds up to powers of two, from four pages on."""
    return max(4 * PAGE, 1 << (n_bytes - 1).bit_length())


class ManualFence:
    """The end of queued copies that read blocks; done when a test says so, or somebody waits for it."""

    def __init__(self, device: LedgerDevice, *addresses: int) -> None:
        self.device = device
        self.addresses = addresses
        self.is_done = False
        self.waited = 0
        device.fences.append(self)

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.device.assert_unlocked("wait for a fence")
        self.waited += 1
        self.finish()

    def finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.device.fences.remove(self)


class LedgerDevice:
    """Hands out addresses behind which there is nothing, and keeps the books: by whom, how much, who reads.

    `after_alloc` is called with the live bytes after every allocation. Freeing what a queued copy reads is an
    error, as is an allocation, a free or a wait while a pool's lock is held.
    """

    def __init__(self, rounding: Callable[[int], int] = whole_pages) -> None:
        self.rounding = rounding
        self.faults = FaultPlan()
        self.live: dict[int, int] = {}
        self.fences: list[ManualFence] = []
        self.pools: list[HostPool] = []
        self.n_allocs = 0
        self.after_alloc: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._next = PAGE

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(self.live.values())

    def pinned_allocation_bytes(self, n_bytes: int) -> int:
        return self.rounding(n_bytes)

    def alloc_pinned(self, n_bytes: int) -> int:
        self.assert_unlocked("allocate")
        self.faults.check("alloc_pinned", DeviceError)
        with self._lock:
            address = self._next
            self._next += self.rounding(n_bytes) + PAGE
            self.live[address] = self.rounding(n_bytes)
            self.n_allocs += 1
        self.after_alloc()
        return address

    def free(self, address: int) -> None:
        self.assert_unlocked("free")
        with self._lock:
            n_bytes = self.live.pop(address)
        assert not self.read_within(address, n_bytes), "I10: freed while a queued copy reads it"

    def read_within(self, address: int, n_bytes: int) -> bool:
        """Whether a queued copy reads the range."""
        return any(address <= at < address + n_bytes for fence in list(self.fences) for at in fence.addresses)

    def assert_unlocked(self, what: str) -> None:
        """Assert that no pool's lock is held; only tests of one thread list their pools here."""
        for pool in self.pools:
            assert not pool._lock.locked(), f"{what} with the pool's lock held"


def bring(pool: HostPool, key: tuple[int, int], n_bytes: int) -> bool:
    """Begin and end a fill; whether the pool had a copy."""
    handle = FillHandle(key, n_bytes, n_bytes)
    try:
        pool.begin_fill(handle)
        hit = handle.hit
        if not hit:
            pool.complete_fill(handle)
    finally:
        pool.end_fill(handle)
    return hit
