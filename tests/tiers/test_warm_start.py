"""What the tiers learn of demand: a profile at the start, and quotas that follow it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import expertier as et
from expertier.errors import BusyError
from expertier.hip.host import HostDevice
from expertier.planner import PolicyKind
from expertier.testing import LayerShape, PatternSource, synthetic_table

TABLE = synthetic_table([LayerShape(n_experts=32), LayerShape(n_experts=32)], top_k=2)
SLOTS = 8


def make(policy: PolicyKind = PolicyKind.LFU_DECAY) -> et.TierManager:
    budget = sum(demand.bytes_for(SLOTS) for demand in TABLE.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=1 << 20, fill_threads=0, policy=policy)
    return et.TierManager(TABLE, device=HostDevice(), config=config, source=PatternSource())


@pytest.fixture
def tiers() -> Iterator[et.TierManager]:
    with make() as tiers:
        yield tiers
        tiers.check_valid()


def test_a_profile_fills_the_slots_with_the_most_used_experts(tiers: et.TierManager) -> None:
    uses = np.zeros((2, 32))
    uses[0, [30, 3, 20]] = [5, 9, 7]
    uses[1, :] = np.arange(32)
    assert tiers.warm_start(uses) == 3 + SLOTS
    tiers.drain()
    assert set(tiers._residency.residents(0)) == {3, 20, 30}
    assert set(tiers._residency.residents(1)) == set(range(24, 32))
    assert tiers.stats().l1.misses == 0
    tiers.acquire(1, [31, 30]).release()
    assert tiers.stats().l1.hits == 2
    tiers.acquire(1, [0]).release()
    assert {30, 31} <= set(tiers._residency.residents(1)), "what the profile calls hot stays"


def test_a_profile_of_another_model_is_refused(tiers: et.TierManager) -> None:
    with pytest.raises(ValueError, match="make the profile from this model"):
        tiers.warm_start(np.ones((2, 16)))
    lease = tiers.acquire(0, [1])
    with pytest.raises(BusyError, match="take the heat of a profile"):
        tiers.warm_start(np.ones((2, 32)))
    lease.release()


def run(tiers: et.TierManager, draws: tuple[int, int], steps: int = 1500, seed: int = 0) -> int:
    """Route evenly over the first `draws[layer]` experts; return the bytes that the last third missed."""
    rng = np.random.default_rng(seed)
    before = 0
    for step in range(steps):
        if step == 2 * steps // 3:
            before = tiers.stats().l1.bytes_in
        for layer, n in enumerate(draws):
            tiers.acquire(layer, rng.choice(n, 2, replace=False).astype(np.int32)).release()
        tiers.rebalance()
    return tiers.stats().l1.bytes_in - before


def test_slots_go_to_the_layer_that_can_use_them() -> None:
    """A layer of few experts needs few slots: the others serve the layer that uses many."""
    with make() as follows, make() as stays:
        stays.rebalance = lambda: None  # type: ignore[method-assign]
        missed = run(follows, (3, 14))
        assert follows.slots[0] < SLOTS < follows.slots[1]
        assert missed < run(stays, (3, 14)) / 2
        assert follows.stats().moves.moves >= 1
        follows.check_valid()


def test_even_demand_moves_nothing() -> None:
    with make() as tiers:
        run(tiers, (14, 14))
        assert tiers.slots == (SLOTS, SLOTS)
        assert tiers.stats().moves.moves == 0


def test_a_policy_without_heat_never_moves() -> None:
    with make(PolicyKind.LRU) as tiers:
        run(tiers, (3, 14), steps=200)
        assert tiers.stats().moves.moves == 0


def test_leases_in_the_way_put_it_off(tiers: et.TierManager) -> None:
    lease = tiers.acquire(0, [0])
    run(tiers, (3, 14), steps=900)
    assert tiers.stats().moves.moves == 0
    lease.release()
    run(tiers, (3, 14), steps=60)
    assert tiers.stats().moves.moves == 1
