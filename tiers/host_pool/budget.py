"""The budget that all host pools of a process draw from."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from expertier.tiers.host_pool.fair_share import fair_shares
from expertier.tiers.host_pool.pressure import MemoryPressure


class GivesBack(Protocol):
    """What a budget asks of a pool."""

    def give_back(self, n_bytes: int, keep_bytes: int, *, crossing: bool) -> int:
        """Free about `n_bytes`, in whole chunks, without falling below `keep_bytes`; return what was freed.

        `crossing` allows the last chunk to fall below, as long as the pool was above before.
        """


@dataclass(slots=True, eq=False, weakref_slot=True)
class Account:
    """What one pool takes: for the book-keeping of `HostBudget` only, which changes it under its lock.

    `claim_bytes` is the most that the pool has a use for. `used_bytes` are allocated or about to be,
    `peak_bytes` the most that ever were. `bounce_bytes` are beside the budget. Pools of one `model`, which lies on
    several devices, claim together.
    """

    claim_bytes: int
    pool: weakref.ref[GivesBack]
    used_bytes: int = 0
    peak_bytes: int = 0
    bounce_bytes: int = 0
    model: object = None


class HostBudget:
    """Counts the pinned bytes of several pools together, and keeps them within a limit. Thread-safe.

    Bytes are reserved before they are allocated and released after they are freed, as the allocator rounds
    them, so that the limit holds at every instant (I3). Room that nobody uses is for whoever asks first. When
    there is none, a pool below its fair share, which is in proportion to the claims, gets memory from pools
    above theirs. The machine's memory running short lowers the limit for as long as it lasts.

    Its lock is taken inside the pools' locks. A pool is asked to give memory back only by threads that hold
    neither, so a pool must call `make_room`, `shrink_pools` and `relieve` with its own lock released.
    """

    def __init__(self, limit_bytes: int | None = None, *, pressure: MemoryPressure | None = None) -> None:
        """Limit the pools to `limit_bytes` together, or without it to the largest of the models' claims."""
        self._limit_bytes = limit_bytes
        self._pressure = pressure
        self._lock = threading.Lock()
        self._shrinking = threading.Lock()
        self._references: list[weakref.ref[Account]] = []  # a WeakSet is slower, and in no order
        self._peak_bytes = 0
        self.is_over = False
        """Whether pools have to shrink; read without the lock, as a hint."""

    @property
    def limit_bytes(self) -> int:
        """What the pools may take together now."""
        with self._lock:
            return self._limit()

    @property
    def used_bytes(self) -> int:
        """What they take."""
        with self._lock:
            return self._used()

    @property
    def peak_bytes(self) -> int:
        """The most that they took at any time."""
        return self._peak_bytes

    @property
    def bounce_bytes(self) -> int:
        """What the fixed minimum of every pool takes beside it."""
        with self._lock:
            return sum(account.bounce_bytes for account in self._accounts())

    @property
    def is_short(self) -> bool:
        """Whether the machine has so little memory that the pools may not take what they are allowed."""
        return self._pressure is not None and self._pressure.ceiling_bytes is not None

    def resize(self, limit_bytes: int) -> None:
        """Set the limit; pools shrink now as far as blocks in use allow, and the rest when these are left."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._note_limit()
        self.shrink_pools()

    # ---- for a pool, any lock held

    def open(self, pool: GivesBack, claim_bytes: int, model: object = None) -> Account:
        """Return an account for a pool of `model`, or of a model of its own.

        One that is dropped without `close` is not counted any more.
        """
        with self._lock:
            account = Account(claim_bytes, weakref.ref(pool), model=model)
            self._keep([*self._accounts(), account])
            self._note_limit()
        return account

    def close(self, account: Account) -> None:
        """End an account."""
        with self._lock:
            self._keep([other for other in self._accounts() if other is not account])
            self._note_limit()

    def room(self, account: Account) -> int:
        """Return how many bytes the pool could reserve now."""
        with self._lock:
            return self._room(account)

    def reserve(self, account: Account, n_bytes: int) -> bool:
        """Count bytes that are about to be allocated; False, and nothing counted, where there is no room."""
        with self._lock:
            if n_bytes > self._room(account):
                return False
            account.used_bytes += n_bytes
            account.peak_bytes = max(account.peak_bytes, account.used_bytes)
            self._peak_bytes = max(self._peak_bytes, self._used())
            return True

    def release(self, account: Account, n_bytes: int) -> None:
        """Count bytes that were freed, or not allocated after all."""
        with self._lock:
            account.used_bytes -= n_bytes
            assert account.used_bytes >= 0, f"{-account.used_bytes} bytes were released twice"
            self._note_limit()

    def add_bounce(self, account: Account, n_bytes: int) -> None:
        """Count bytes of the fixed minimum."""
        with self._lock:
            account.bounce_bytes += n_bytes

    def share(self, account: Account) -> int:
        """Return what the pool may take while the others want theirs."""
        with self._lock:
            return self._shares().get(account, 0)

    def others_have(self, account: Account, n_bytes: int) -> bool:
        """Whether the pool is below its share by `n_bytes`, and others are above theirs."""
        with self._lock:
            if len(self._references) == 1:
                return False
            shares = self._shares()
            return account.used_bytes + n_bytes <= shares.get(account, 0) and any(
                other.used_bytes > share for other, share in shares.items() if other is not account
            )

    # ---- for a pool, no lock held

    def make_room(self, account: Account, n_bytes: int) -> None:
        """Have pools above their share free about `n_bytes`, those with the largest excess first."""
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
        """Set what a pool has a use for, and have pools shrink that are above what they may take now."""
        with self._lock:
            account.claim_bytes = claim_bytes
            self._note_limit()
        self.shrink_pools()

    def shrink_pools(self) -> None:
        """Have pools shrink that are above what they may take, as far as blocks in use allow."""
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
        """Look at the machine's memory, unless that was done just now; shrink where it runs short, and where
        blocks could not be given back before.
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
        """Assert that the sums hold, and the limit, unless pools are on their way down to it."""
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
        """Return the accounts whose pools are there, in the order of their opening."""
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

    # ---- without it

    @staticmethod
    def _ask(account: Account, n_bytes: int, keep_bytes: int, *, crossing: bool) -> int:
        pool = account.pool()
        return 0 if pool is None else pool.give_back(n_bytes, keep_bytes, crossing=crossing)


@cache
def process_budget() -> HostBudget:
    """Return the budget of this process: its limit is the largest claim of its models.

    So `MOE_HOST_POOL_MIB` holds for all models of a process together.
    """
    return HostBudget(pressure=MemoryPressure())
