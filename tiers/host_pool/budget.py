"""The budget of pinned memory that all host pools of a process share."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from expertier.tiers.host_pool.fair_share import fair_shares
from expertier.tiers.host_pool.pressure import MemoryPressure


class GivesBack(Protocol):
    """What the budget needs of a pool: that it can give memory back."""

    def give_back(self, n_bytes: int, keep_bytes: int, *, crossing: bool) -> int:
        """Free about `n_bytes`, in whole chunks, and return how many bytes were freed.

        The pool keeps at least `keep_bytes`. With `crossing`, the last chunk that it frees may take it below that.
        """


@dataclass(slots=True, eq=False, weakref_slot=True)
class Account:
    """The bytes of one pool. Only `HostBudget` changes it, with its lock held.

    `claim_bytes` is the most that the pool can use. `used_bytes` are allocated or reserved for an allocation, and
    `peak_bytes` is the highest value that `used_bytes` has had. `bounce_bytes` are those of the bounce blocks, which do
    not count against the limit. Where a model lies on several devices, its pools have the same `model`, and the budget
    adds their claims together.
    """

    claim_bytes: int
    pool: weakref.ref[GivesBack]
    used_bytes: int = 0
    peak_bytes: int = 0
    bounce_bytes: int = 0
    model: object = None


class HostBudget:
    """Counts the pinned bytes of several pools together and keeps the sum within a limit. Thread-safe.

    A pool reserves bytes before it allocates them and releases them after it has freed them, so the limit holds at
    every instant (I3). All sizes are those after the allocator's rounding.

    Free room goes to the pool that asks first. Where there is none, a pool below its fair share gets memory from pools
    above their shares; the shares divide the limit in proportion to the pools' claims. While the machine is short of
    memory, the limit is lower (`MemoryPressure`).

    A pool may call the budget with its own lock held, so the budget's lock comes after the pools' locks. A thread that
    asks a pool to give memory back must hold neither kind of lock. A pool therefore has to release its lock before it
    calls `make_room`, `set_claim`, `shrink_pools` or `relieve`.
    """

    def __init__(self, limit_bytes: int | None = None, *, pressure: MemoryPressure | None = None) -> None:
        """Limit the sum of all pools to `limit_bytes`; by default to the largest claim of any model."""
        self._limit_bytes = limit_bytes
        self._pressure = pressure
        self._lock = threading.Lock()
        self._shrinking = threading.Lock()
        self._references: list[weakref.ref[Account]] = []  # a WeakSet would be slower and has no order
        self._peak_bytes = 0
        self.is_over = False
        """Whether pools have to shrink. Pools read it without the lock, as a hint that may be outdated."""

    @property
    def limit_bytes(self) -> int:
        """The bytes that all pools together may take now."""
        with self._lock:
            return self._limit()

    @property
    def used_bytes(self) -> int:
        """The bytes that all pools together take now, including reserved ones."""
        with self._lock:
            return self._used()

    @property
    def peak_bytes(self) -> int:
        """The highest value that `used_bytes` has had."""
        return self._peak_bytes

    @property
    def bounce_bytes(self) -> int:
        """The bytes of all pools' bounce blocks, which do not count against the limit."""
        with self._lock:
            return sum(account.bounce_bytes for account in self._accounts())

    @property
    def is_short(self) -> bool:
        """Whether the machine is so short of memory that the limit is lowered."""
        return self._pressure is not None and self._pressure.ceiling_bytes is not None

    def resize(self, limit_bytes: int) -> None:
        """Set the limit. Pools shrink at once, except for chunks with blocks in use, which go when their use ends."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._note_limit()
        self.shrink_pools()

    # ---- for a pool, which may hold its lock

    def open(self, pool: GivesBack, claim_bytes: int, model: object = None) -> Account:
        """Return a new account for `pool`; without `model` the pool is the only one of its model.

        An account that is garbage-collected counts no more, even without `close`.
        """
        with self._lock:
            account = Account(claim_bytes, weakref.ref(pool), model=model)
            self._keep([*self._accounts(), account])
            self._note_limit()
        return account

    def close(self, account: Account) -> None:
        """Stop counting an account."""
        with self._lock:
            self._keep([other for other in self._accounts() if other is not account])
            self._note_limit()

    def room(self, account: Account) -> int:
        """Return how many bytes the pool could reserve now."""
        with self._lock:
            return self._room(account)

    def reserve(self, account: Account, n_bytes: int) -> bool:
        """Count bytes that are about to be allocated, and return True; return False where there is no room for them."""
        with self._lock:
            if n_bytes > self._room(account):
                return False
            account.used_bytes += n_bytes
            account.peak_bytes = max(account.peak_bytes, account.used_bytes)
            self._peak_bytes = max(self._peak_bytes, self._used())
            return True

    def release(self, account: Account, n_bytes: int) -> None:
        """Subtract bytes that were freed, or that were reserved and not allocated after all."""
        with self._lock:
            account.used_bytes -= n_bytes
            assert account.used_bytes >= 0, f"{-account.used_bytes} bytes were released twice"
            self._note_limit()

    def add_bounce(self, account: Account, n_bytes: int) -> None:
        """Count bytes of bounce blocks; a negative number where they were freed."""
        with self._lock:
            account.bounce_bytes += n_bytes

    def share(self, account: Account) -> int:
        """Return the pool's fair share in bytes: what it may keep while other pools want their shares."""
        with self._lock:
            return self._shares().get(account, 0)

    def others_have(self, account: Account, n_bytes: int) -> bool:
        """Whether the pool could take `n_bytes` more within its share, and another pool is above its own share."""
        with self._lock:
            if len(self._references) == 1:
                return False
            shares = self._shares()
            return account.used_bytes + n_bytes <= shares.get(account, 0) and any(
                other.used_bytes > share for other, share in shares.items() if other is not account
            )

    # ---- for a pool, which must not hold its lock

    def make_room(self, account: Account, n_bytes: int) -> None:
        """Have other pools that are above their share free about `n_bytes`, the pool with the largest excess first."""
        with self._lock:
            crossing = account.used_bytes == 0
            excess = [
                (other.used_bytes - share, share, other)
                for other, share in self._shares().items()
                if other is not account and other.used_bytes > share
            ]
        for _, share, other in sorted(excess, key=lambda entry: -entry[0]):
            if n_bytes > 0:
                n_bytes -= self._ask(other, n_bytes, share, crossing=crossing)

    def set_claim(self, account: Account, claim_bytes: int) -> None:
        """Set the most that a pool can use, and have pools shrink that are now above what they may take."""
        with self._lock:
            account.claim_bytes = claim_bytes
            self._note_limit()
        self.shrink_pools()

    def shrink_pools(self) -> None:
        """Have pools shrink that are above their claim, or above their share where the limit is exceeded.

        Chunks with blocks in use stay.
        """
        with self._shrinking:
            with self._lock:
                too_much = self._used() - self._limit()
                asked = []
                for account, share in self._shares().items():
                    above_claim = account.used_bytes - account.claim_bytes
                    above_share = min(account.used_bytes - share, too_much)
                    if (n_bytes := max(above_claim, above_share)) > 0:
                        asked.append((account, n_bytes, share))
            for account, n_bytes, share in asked:
                self._ask(account, n_bytes, share, crossing=True)

    def relieve(self) -> None:
        """Look at the machine's memory, unless that was done just now, and have pools shrink where they have to.

        They have to where the memory runs short, or where an earlier shrinking had to leave blocks in use.
        """
        if self._pressure is not None and self._pressure.is_due():
            with self._lock:
                used, limit = self._used(), self._own_limit()
            if self._pressure.poll(used, limit):
                with self._lock:
                    self._note_limit()
        if self.is_over:
            self.shrink_pools()

    def check_valid(self) -> None:
        """Assert that counts and shares agree, and that `is_over` is set exactly where pools have to shrink."""
        with self._lock:
            used = self._used()
            assert used <= self._peak_bytes, f"{used} bytes used, {self._peak_bytes} at most"
            over = used > self._limit() or any(
                account.used_bytes > account.claim_bytes for account in self._accounts()
            )
            assert self.is_over == over, f"{used} bytes of {self._limit()}, over: {self.is_over}"
            shares = self._shares()
            assert sum(shares.values()) <= self._limit(), "the shares are more than the whole"
            assert all(0 <= share <= account.claim_bytes for account, share in shares.items())

    # ---- with the lock held

    def _accounts(self) -> list[Account]:
        """Return the accounts that still exist, in the order in which they were opened."""
        return [account for reference in self._references if (account := reference()) is not None]

    def _keep(self, accounts: list[Account]) -> None:
        self._references = [weakref.ref(account) for account in accounts]

    def _own_limit(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        claims: dict[int, int] = {}
        for account in self._accounts():
            model = id(account if account.model is None else account.model)
            claims[model] = claims.get(model, 0) + account.claim_bytes
        return max(claims.values(), default=0)

    def _limit(self) -> int:
        limit = self._own_limit()
        ceiling = self._pressure.ceiling_bytes if self._pressure is not None else None
        return limit if ceiling is None else min(limit, ceiling)

    def _used(self) -> int:
        return sum(account.used_bytes for account in self._accounts())

    def _room(self, account: Account) -> int:
        own = account.claim_bytes - account.used_bytes
        return max(0, min(own, self._limit() - self._used()))

    def _shares(self) -> dict[Account, int]:
        accounts = self._accounts()
        shares = fair_shares(self._limit(), [account.claim_bytes for account in accounts])
        return dict(zip(accounts, shares, strict=True))

    def _note_limit(self) -> None:
        self.is_over = self._used() > self._limit() or any(
            account.used_bytes > account.claim_bytes for account in self._accounts()
        )

    # ---- with no lock held

    @staticmethod
    def _ask(account: Account, n_bytes: int, keep_bytes: int, *, crossing: bool) -> int:
        pool = account.pool()
        return 0 if pool is None else pool.give_back(n_bytes, keep_bytes, crossing=crossing)


@cache
def process_budget() -> HostBudget:
    """Return the one budget of this process, whose limit is the largest claim of any of its models.

    Thus `MOE_HOST_POOL_MIB` limits all models of a process together.
    """
    return HostBudget(pressure=MemoryPressure())
