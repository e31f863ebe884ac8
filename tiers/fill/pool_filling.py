"""The filling of the host pool's free room from the file, in the background.

             start                    a demand read begins
    OFF ──────────────► ACTIVE ─────────────────────────────► PAUSED
                         │ ▲ ▲ ──────────────────────────────── │
                         │ │      the last demand read ends
      no room is left,   │ │ a demand read ends a second or more later and
      or all are there   ▼ │ copies may have room again; `look_again`
                        RESTS                     ACTIVE ──────────────► STOPPED ─── start ───► ACTIVE
                                                     an error, or the tiers are closed

1. One expert at a time, and each is a background task of its own, queued when the one before it is done: prefetches
   that were asked for meanwhile go first, and so do boundary moves.
2. Nothing begins while somebody waits for experts. An expert that is under way is finished: demand may wait for it.
3. It takes only room that nobody uses (`HostPool.begin_fill_ahead`), and what it brings is the first to be evicted.
4. First come experts that no slot holds, of layers that cannot hold all of theirs; the others may leave their slots.
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
"""How long it rests at least where there is nothing to do: looking costs a pass over all experts."""

_log = logging.getLogger(__name__)


class FillingState(Enum):
    """What the filling does; the arrows are above."""

    OFF = auto()
    ACTIVE = auto()
    PAUSED = auto()
    RESTS = auto()
    STOPPED = auto()


class PoolFilling:
    """Brings experts into the host pool that nobody has asked for yet, for as long as it has free room.

    Thread-safe. Nothing here raises, but an interrupt where the tiers have no threads of their own.
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
        """Connect; nothing is read before `start`."""
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
        self._crowded: set[int] = set()  # expert sizes that had no room since this pass began
        self._n_lost = 0  # copies that had been evicted when it came to rest
        self._look_at_s = self._began_s = 0.0
        self._n_before = 0
        self._told = True
        self.state = FillingState.OFF
        """What it does now."""

    def start(self, order: Sequence[ExpertKey]) -> None:
        """Fill the pool with these experts, the most urgent first; does nothing while it does that already.

        What is there is passed over.
        """
        with self._lock:
            if self.state in (FillingState.ACTIVE, FillingState.PAUSED):
                return
            self._order = order
            self._demand.when_quiet = self._quiet
            if not self._pool.is_on:
                self.state = FillingState.RESTS  # until it is given a budget
                return
            self._began_s, self._n_before, self._told = self._clock(), self._pool.stats().ahead_fills, False
            self._activate()
        _log.info("filling the host pool from the file in the background, as far as it has room")
        self._queue()

    def look_again(self) -> None:
        """Go on if it rests: there may be room now."""
        with self._lock:
            if self.state is not FillingState.RESTS:
                return
            self._activate()
        self._queue()

    def close(self) -> None:
        """End it: the tiers were closed, and what was queued is forgotten."""
        if self.state in (FillingState.ACTIVE, FillingState.PAUSED):
            self._stop()

    # ---- on the thread of whoever waited

    def _quiet(self) -> None:
        """Go on: nobody waits for an expert any more."""
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
        """Whether to look for room, or for experts that have left: they left room, or somebody else took it."""
        if self._clock() < self._look_at_s or not self._pool.is_on:
            return False
        self._look_at_s = self._clock() + REST_S
        return bool(self._crowded) or self._pool.n_lost != self._n_lost

    # ---- on a worker's thread

    def _step(self) -> None:
        """Bring one expert, and queue the next."""
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
        if not self._demand.under_way:  # it may have ended before it could see that this pauses
            self._quiet()

    def _bring_next(self) -> bool:
        """Read the next expert that is missing; False where none is, or none has room."""
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
        """Yield who to bring, by what is in the slots when each one's turn comes."""
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
        """Whether the layer has a slot for every expert, which then never leave."""
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
        """Log the end of the first round, and no later one."""
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

    # ---- without it

    def _queue(self) -> None:
        self._workers.later(self, self._step)
