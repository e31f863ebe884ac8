"""Memory pressure and pauses of growth, with a machine and a clock of our own."""

from __future__ import annotations

import pytest

from expertier.tiers.host_pool.budget import HostBudget
from expertier.tiers.host_pool.fill_handle import FillHandle
from expertier.tiers.host_pool.growth_pause import FIRST_PAUSE_S, LONGEST_PAUSE_S, GrowthPause
from expertier.tiers.host_pool.pool import USES_PER_LOOK, HostPool
from expertier.tiers.host_pool.pressure import FLOOR_DIVISOR, INTERVAL_S, LARGEST_FLOOR_BYTES, MemoryPressure
from expertier.units import GIB, MIB
from failures.pool_fakes import PAGE, LedgerDevice, bring

FLOOR = 100


class Machine:
    """A machine whose available memory and clock are set by hand."""

    def __init__(self, floor: int | None = FLOOR, available: int = 10_000) -> None:
        self.available = available
        self.now_s = 5.0
        self.looks = 0
        self.pressure = MemoryPressure(floor, available_bytes=self.look, clock=lambda: self.now_s)

    def look(self) -> int:
        self.looks += 1
        return self.available

    def ceiling(self, available: int, used: int, limit: int = 1000) -> int | None:
        """What a look makes of the ceiling."""
        self.available = available
        self.now_s += INTERVAL_S
        before = self.pressure.ceiling_bytes
        changed = self.pressure.poll(used, limit)
        assert changed == (self.pressure.ceiling_bytes != before)
        return self.pressure.ceiling_bytes


def test_it_shrinks_below_the_floor_waits_between_the_marks_and_grows_above() -> None:
    machine = Machine()
    assert machine.ceiling(101, used=500) is None
    assert machine.ceiling(60, used=500) == 500 - (150 - 60)
    assert machine.ceiling(150, used=410) == 410
    assert machine.ceiling(200, used=410) == 410
    assert machine.ceiling(230, used=410) == 440
    assert machine.ceiling(230, used=100) == 440, "a ceiling does not fall because little is used"
    assert machine.ceiling(199, used=440) == 440
    assert machine.ceiling(800, used=440) is None, "above the limit it is gone"


def test_it_never_asks_for_less_than_nothing() -> None:
    machine = Machine()
    assert machine.ceiling(0, used=20) == 0
    assert machine.ceiling(0, used=0) == 0


def test_the_machine_is_asked_once_an_interval() -> None:
    machine = Machine()
    machine.ceiling(50, used=500)
    looks = machine.looks
    machine.available = 10_000
    machine.now_s += INTERVAL_S * 0.99
    assert not machine.pressure.poll(500, 1000)
    assert machine.looks == looks
    machine.now_s += INTERVAL_S
    assert machine.pressure.poll(500, 1000)


def test_two_threads_do_not_ask_at_once() -> None:
    machine = Machine()
    machine.now_s += INTERVAL_S
    with machine.pressure._lock:
        assert not machine.pressure.poll(500, 1000)
    assert machine.looks == 0


@pytest.mark.parametrize(
    ("available", "floor"), [(64 * MIB, 64 * MIB // FLOOR_DIVISOR), (900 * GIB, LARGEST_FLOOR_BYTES)]
)
def test_the_floor_follows_what_is_available_at_the_start(available: int, floor: int) -> None:
    assert Machine(None, available).pressure.floor_bytes == floor


# ---- what a pool makes of it


def test_a_pool_shrinks_under_pressure_and_grows_again() -> None:
    machine = Machine(floor=8 * PAGE, available=1000 * PAGE)
    budget = HostBudget(20 * PAGE, pressure=machine.pressure)
    device = LedgerDevice()
    pool = HostPool(device, budget_bytes=20 * PAGE, largest_block_bytes=PAGE, budget=budget)
    device.pools.append(pool)
    for expert in range(20):
        bring(pool, (0, expert), PAGE)
    held = FillHandle((0, 0), PAGE, PAGE)
    pool.begin_fill(held)
    assert pool.stats().used_bytes == 20 * PAGE
    machine.available = 7 * PAGE  # five below one and a half times the floor
    machine.now_s += INTERVAL_S
    bring(pool, (0, 50), PAGE)
    pool.check_valid()
    stats = pool.stats()
    assert stats.used_bytes == 15 * PAGE
    assert stats.given_back_bytes == 5 * PAGE
    assert {key for key, _ in pool.copies()} == {(0, 0), (0, 50)} | {(0, expert) for expert in range(7, 20)}
    machine.available = 0
    for expert in (51, 52, 53):
        machine.now_s += INTERVAL_S
        bring(pool, (0, expert), PAGE)
        pool.check_valid()
    assert {key for key, _ in pool.copies()} == {(0, 0)}, "what is in use stays"
    pool.end_fill(held)
    assert pool.stats().used_bytes == 0
    machine.available = 1000 * PAGE
    machine.now_s += INTERVAL_S
    for expert in range(20):
        bring(pool, (0, expert), PAGE)
    assert pool.stats().used_bytes == 20 * PAGE
    pool.close()


def test_a_pool_that_only_hits_looks_as_well() -> None:
    machine = Machine(floor=PAGE, available=1000 * PAGE)
    budget = HostBudget(4 * PAGE, pressure=machine.pressure)
    pool = HostPool(LedgerDevice(), budget_bytes=4 * PAGE, largest_block_bytes=PAGE, budget=budget)
    bring(pool, (0, 0), PAGE)
    bring(pool, (0, 1), PAGE)
    machine.available = 0
    machine.now_s += INTERVAL_S
    for _ in range(USES_PER_LOOK):
        assert pool.contains((0, 1)) == bring(pool, (0, 1), PAGE)
    assert not pool.contains((0, 0))
    pool.close()


# ---- pauses


def test_a_first_refusal_is_retried_at_once_and_later_ones_after_longer_and_longer_pauses() -> None:
    now_s = [100.0]
    pause = GrowthPause(lambda: now_s[0])
    assert not pause.is_on()
    pause.refused()
    assert not pause.is_on()
    expected = FIRST_PAUSE_S
    for refusals in range(2, 20):
        pause.refused()
        assert pause.refusals == refusals
        assert pause.is_on()
        now_s[0] += expected * 0.99
        assert pause.is_on()
        now_s[0] += expected * 0.02
        assert not pause.is_on()
        expected = min(2 * expected, LONGEST_PAUSE_S)
    assert expected == LONGEST_PAUSE_S
    pause.granted()
    pause.refused()
    assert not pause.is_on()
