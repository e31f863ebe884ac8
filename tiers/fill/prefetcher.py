"""Fetches experts ahead of demand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import numpy as np
import numpy.typing as npt

from expertier.planner.policy.residency import Residency
from expertier.tiers.access.usage import Usage
from expertier.tiers.fill.filler import Filler
from expertier.tiers.fill.workers import FillWorkers
from expertier.tiers.host_pool.block import ExpertKey
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.shared.layer_locks import LayerLocks
from expertier.tiers.shared.stats import PrefetchStats

I32 = npt.NDArray[np.int32]

MAX_WAITING = 256
"""How many experts may wait to be prefetched; requests beyond that are dropped."""

_log = logging.getLogger(__name__)


class Target(StrEnum):
    """Where a prefetch brings experts."""

    L1 = "l1"
    """Into a slot, as the coldest expert: it is the next to be evicted unless it is used before."""

    L2 = "l2"
    """Into the host pool only."""

    FREE_SLOT = "free-slot"
    """Into a slot that is still FREE; where the layer has none, into the host pool."""


class Prefetcher:
    """Fills slots and the host pool ahead of demand, at low priority. Thread-safe.

    Its methods raise nothing, block no caller, and evict no pinned expert. Where demand asks for an expert whose
    prefetch has not begun, demand fetches it; where the prefetch has begun, demand waits for it.
    """

    def __init__(
        self,
        residency: Residency,
        locks: LayerLocks,
        usage: Usage,
        workers: FillWorkers,
        filler: Filler,
        pool: HostPool,
        before_ready: Callable[[int, I32], None],
    ) -> None:
        """Connect the parts; nothing is fetched. `before_ready(layer, slots)` is called before slots become READY."""
        self._residency = residency
        self._locks = locks
        self._usage = usage
        self._workers = workers
        self._filler = filler
        self._pool = pool
        self._before_ready = before_ready
        self._lock = threading.Lock()
        self._waiting: set[tuple[ExpertKey, Target]] = set()
        self._stats = PrefetchStats()

    def ask(
        self, layer: int, experts: Sequence[int], target: Target, *, n_asked: int, limit: int = MAX_WAITING
    ) -> None:
        """Queue prefetches of the experts of a layer that are not present yet.

        `n_asked` is how many experts the caller was asked for, including those that the model does not have and that
        are missing in `experts`. At most `limit` prefetches wait at a time.
        """
        self._add(asked=n_asked - len(experts), dropped=n_asked - len(experts))
        for expert in experts:
            label = ((layer, expert), target)
            if self._is_there((layer, expert), target):
                continue
            with self._lock:
                if label in self._waiting:
                    continue
                full = len(self._waiting) >= limit
                if not full:
                    self._waiting.add(label)
            self._add(asked=1, dropped=full)
            if full:
                continue
            self._workers.later(label, partial(self._fetch, (layer, expert), target))

    def ask_all(self, keys: Sequence[ExpertKey]) -> None:
        """Queue prefetches into L1 of experts that have no slot, no matter how many prefetches wait already."""
        with self._lock:
            labels = [(key, Target.L1) for key in keys if (key, Target.L1) not in self._waiting]
            self._waiting.update(labels)
        self._add(asked=len(labels))
        self._workers.later_all([(label, partial(self._fetch, *label)) for label in labels])

    def cancel(self, layer: int | None = None) -> int:
        """Drop the prefetches that have not begun, of one layer or of all layers; return how many they were."""
        cancelled: list[tuple[ExpertKey, Target]] = []

        def chosen(label: object) -> bool:
            if not isinstance(label, tuple) or (layer is not None and label[0][0] != layer):
                return False
            cancelled.append(label)
            return True

        self._workers.cancel(chosen)
        with self._lock:
            self._waiting.difference_update(cancelled)
        self._add(dropped=len(cancelled))
        return len(cancelled)

    def stats(self, useful_bytes: int, wasted_bytes: int) -> PrefetchStats:
        """Return the counts so far, together with the given bytes, which the residency tables count."""
        return replace(self._stats, useful_bytes=useful_bytes, wasted_bytes=wasted_bytes)

    # ---- on a worker's thread

    def _fetch(self, key: ExpertKey, target: Target) -> None:
        with self._lock:
            self._waiting.discard((key, target))
        if not self._usage.enter_background():
            self._add(dropped=1)
            return
        try:
            if target is Target.FREE_SLOT and not self._residency.has_free(key[0]):
                target = Target.L2
            if self._is_there(key, target) or (target is Target.L2 and not self._pool.is_on):
                self._add(dropped=1)
            elif target is Target.L2:
                self._filler.fill_host_copy(*key)
                self._add(done=1)
            else:
                came = self._into_slot(*key)
                self._add(done=came, dropped=not came)
        except BaseException as error:
            self._add(failed=1)
            if not isinstance(error, Exception):  # an interrupt of `drain`, which runs this without threads
                raise
            _log.debug("prefetch of expert %d of layer %d failed: %s", key[1], key[0], error)
        finally:
            self._usage.leave_background()

    def _into_slot(self, layer: int, expert: int) -> bool:
        """Fill an unpinned slot and return True; return False where there is none or the expert has a slot already."""
        locks = self._locks.address
        slot = self._residency.take_for_prefetch(locks, layer, expert)
        if slot < 0:
            return False
        held = np.array([slot, 1], np.int32)
        slots = held[:-1]
        try:
            self._pool.touch((layer, evicted) for evicted in self._residency.experts_evicted_by(layer, slots))
            self._filler.fill_one(layer, expert, slot, prefetch=True)
            self._before_ready(layer, slots)
            self._residency.finish_held(locks, layer, held)
        except BaseException:
            self._residency.abort_held(locks, layer, held)
            raise
        return True

    def _is_there(self, key: ExpertKey, target: Target) -> bool:
        """Whether a prefetch has nothing to do. Looks without a lock, because the policy looks again with the lock."""
        if self._residency.slot_of[key] >= 0:
            return True
        return target is Target.L2 and self._pool.contains(key)

    def _add(self, *, asked: int = 0, done: int = 0, dropped: int = 0, failed: int = 0) -> None:
        with self._lock:
            now = self._stats
            self._stats = PrefetchStats(
                now.asked + asked, now.done + done, now.dropped + dropped, now.failed + failed
            )
