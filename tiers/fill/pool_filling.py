"""Fills the host pool's free room from the file, in the background.

             start                    a demand read begins
    OFF ──────────────► ACTIVE ─────────────────────────────► PAUSED
                         │ ▲ ▲ ──────────────────────────────── │
                         │ │      the last demand read ends
      no room is left,   │ │ a demand read ends a second or more later and
      or all experts     ▼ │ copies may have room again; `look_again`
      are present       RESTS                     ACTIVE ──────────────► STOPPED ─── start ───► ACTIVE
                                                     an error, or the tiers are closed

1. Experts are read one at a time. Each is a background task, which is queued when the task before it is done, so that
   prefetches asked for meanwhile go first, and so do moves of the boundary.
2. No read begins while a thread waits for experts. A read that runs is finished, because demand may wait for it.
3. Only free room is used (`HostPool.begin_fill_ahead`), and copies made here are the first to be evicted.
4. First come experts that no slot holds, of layers with fewer slots than experts. Then come experts that have a slot
   now but may be evicted from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

from expertier.planner.policy.residency import Residency
from expertier.tiers.access.usage import Usage
from expertier.tiers.fill.demand_reads import DemandReads
from expertier.tiers.fill.filler import Filler
from expertier.tiers.fill.workers import FillWorkers
from expertier.tiers.host_pool.block import ExpertKey
from expertier.tiers.host_pool.fill_handle import FreeRoom
from expertier.tiers.host_pool.pool import HostPool
from expertier.tiers.model.layer import ExpertLayer
from expertier.units import mib

REST_S = 1.0
"""The shortest rest, in seconds, where there is nothing to do, because every look takes a pass over all experts."""

_log = logging.getLogger(__name__)


class FillingState(Enum):
    """What the filling does now; the module's docstring draws the transitions."""

    OFF = auto()
    ACTIVE = auto()
    PAUSED = auto()
    RESTS = auto()
    STOPPED = auto()


class PoolFilling:
    """Brings experts into the host pool ahead of demand, for as long as the pool has free room.

    Thread-safe. Its methods raise nothing, except an interrupt where the tiers have no threads of their own.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        residency: Residency,
        usage: Usage,
        workers: FillWorkers,
        filler: Filler,
        pool: HostPool,
        demand: DemandReads,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect the parts; nothing is read before `start`."""
        self._layers = layers
        self._residency = residency
        self._usage = usage
        self._workers = workers
        self._filler = filler
        self._pool = pool
        self._demand = demand
        self._clock = clock
        self._lock = threading.Lock()
        self._order: Sequence[ExpertKey] = ()
        self._left: Iterator[ExpertKey] = iter(())
        self._crowded: set[int] = set()  # sizes of experts for which this pass found no room
        self._n_lost = 0  # `HostPool.n_lost` when the last pass ended
        self._look_at_s = self._began_s = 0.0
        self._n_before = 0
        self._told = True
        self.state = FillingState.OFF
        """What the filling does now."""

    def start(self, order: Sequence[ExpertKey]) -> None:
        """Begin to fill the pool with these experts, the most urgent first; do nothing where a filling runs already.

        Experts that the pool has already are passed over.
        """
        with self._lock:
            if self.state in (FillingState.ACTIVE, FillingState.PAUSED):
                return
            self._order = order
            self._demand.when_quiet = self._quiet
            if not self._pool.is_on:
                self.state = FillingState.RESTS  # until the pool is given a budget
                return
            self._began_s, self._n_before, self._told = self._clock(), self._pool.stats().ahead_fills, False
            self._activate()
        _log.info("filling the host pool from the file in the background, as far as it has room")
        self._queue()

    def look_again(self) -> None:
        """Begin another pass where the filling rests, because the pool may have room now."""
        with self._lock:
            if self.state is not FillingState.RESTS:
                return
            self._activate()
        self._queue()

    def close(self) -> None:
        """End the filling, after the tiers were closed and their background tasks dropped."""
        if self.state in (FillingState.ACTIVE, FillingState.PAUSED):
            self._stop()

    # ---- on the thread that waited for experts

    def _quiet(self) -> None:
        """Go on, because no thread waits for experts any more."""
        if self.state not in (FillingState.PAUSED, FillingState.RESTS):
            return
        with self._lock:
            if self.state is FillingState.PAUSED:
                self.state = FillingState.ACTIVE
            elif self.state is FillingState.RESTS and self._may_pay():
                self._activate()
            else:
                return
        self._queue()

    def _may_pay(self) -> bool:
        """Whether another pass may find work: there was no room before, or copies have left the pool since."""
        if self._clock() < self._look_at_s or not self._pool.is_on:
            return False
        self._look_at_s = self._clock() + REST_S
        return bool(self._crowded) or self._pool.n_lost != self._n_lost

    # ---- on a worker's thread

    def _step(self) -> None:
        """Bring one expert into the pool, and queue the next step."""
        if self._demand.under_way:
            self._pause()
            return
        if not self._usage.enter_background():
            self._stop()
            return
        try:
            came = self._bring_next()
        except BaseException as error:
            self._stop()
            if not isinstance(error, Exception):
                raise
            _log.warning(
                "the host pool is not filled in the background any more, experts are read when they are asked for: %s",
                error,
            )
            return
        finally:
            self._usage.leave_background()
        if came:
            self._queue()
        else:
            self._rest()

    def _pause(self) -> None:
        with self._lock:
            self.state = FillingState.PAUSED
        if not self._demand.under_way:  # demand may have ended before the state was PAUSED
            self._quiet()

    def _bring_next(self) -> bool:
        """Read the next missing expert for which there is room, and return True; return False where there is none."""
        for key in self._left:
            if self._layers[key[0]].expert_bytes in self._crowded or self._pool.contains(key):
                continue
            room = self._filler.fill_host_copy_ahead(*key)
            if room is FreeRoom.BEGUN:
                return True
            if room is FreeRoom.NONE:
                self._crowded.add(self._layers[key[0]].expert_bytes)
        return False

    def _missing(self) -> Iterator[ExpertKey]:
        """Yield the experts to bring, in an order that follows what the slots hold at each moment (rule 4)."""
        later = []
        for key in self._order:
            if self._has_slot_for_all(key[0]) or self._residency.slot_of[key] >= 0:
                later.append(key)
            else:
                yield key
        for key in later:
            if not (self._has_slot_for_all(key[0]) and self._residency.slot_of[key] >= 0):
                yield key

    def _has_slot_for_all(self, layer: int) -> bool:
        """Whether the layer has a slot for every expert, so that none of its experts is evicted."""
        return bool(self._residency.n_slots[layer] >= self._layers[layer].n_experts)

    def _rest(self) -> None:
        with self._lock:
            self.state = FillingState.RESTS
            self._n_lost = self._pool.n_lost
            self._look_at_s = self._clock() + REST_S
        self._tell("no room is left" if self._crowded else "every expert has a place")

    def _stop(self) -> None:
        with self._lock:
            self.state = FillingState.STOPPED
        self._tell("stopped")

    def _tell(self, how: str) -> None:
        """Log the end of the first pass; later passes are not logged."""
        if self._told:
            return
        self._told = True
        stats = self._pool.stats()
        _log.info(
            "filled the host pool with %d experts in the background in %.1f s, it takes %s: %s",
            stats.ahead_fills - self._n_before,
            self._clock() - self._began_s,
            mib(stats.used_bytes),
            how,
        )

    # ---- with the lock held

    def _activate(self) -> None:
        self.state = FillingState.ACTIVE
        self._left = self._missing()
        self._crowded.clear()

    # ---- with no lock held

    def _queue(self) -> None:
        self._workers.later(self, self._step)
