"""Predictions: the sum by hand, their ranges, and which way they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import LayerDemand
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.geometry import BlockMemory, ModelGeometry
from expertier.planner.predict.hit_rates import FromExperience, Misses
from expertier.planner.predict.rates import MachineRates, PathRate
from expertier.planner.predict.speed import Workload, predict

DEMANDS = [LayerDemand(layer=i, n_experts=32, top_k=4, slot_bytes=10**6, fixed_bytes=0) for i in range(10)]
GEOMETRY = ModelGeometry("qwen3moe", 64, 100, 2, 4, 64, 64, 0, (BlockMemory(),) * 10, 60 * 10**6, 0)
RATES = MachineRates(
    decode=PathRate(1e10, 1e-4, 0.1, True),
    prefill=PathRate(1e11, 0, 0.1, True),
    pool=PathRate(1e10, 1e-5, 0.1, True),
    page_cache=PathRate(2e9, 1e-4, 0.2, True),
    disk=PathRate(1e9, 2e-4, 0.3, True),
)


class Fixed:
    """Hit rates that are given."""

    source = "given"

    def __init__(self, **misses: float) -> None:
        self._misses = Misses(
            **{"low": 8.0, "expected": 10.0, "high": 13.0, "lookups": 40.0, "bytes": 1e7} | misses
        )

    def misses(self, slots: object, pool_bytes: int = 0) -> Misses:  # noqa: ARG002
        return self._misses


def work(**changes: object) -> Workload:
    return replace(Workload(GEOMETRY, DEMANDS, (16,) * 10, ContextShape()), **changes)


def test_the_sum_by_hand() -> None:
    found = predict(work(cached_share=0.75), Fixed(pool_share=0.5), RATES)
    assert found.compute_s == pytest.approx(10 * 1e-4 + (60e6 + 40e6) / 1e10)
    assert found.pool_s == pytest.approx(5 * 1e-5 + 5e6 / 1e10)
    assert found.page_cache_s == pytest.approx(3.75 * 1e-4 + 3.75e6 / 2e9)
    assert found.disk_s == pytest.approx(1.25 * 2e-4 + 1.25e6 / 1e9)
    total = found.compute_s + found.pool_s + found.page_cache_s + found.disk_s
    assert found.decode.predicted == pytest.approx(1 / total)
    slow = found.compute_s * 1.1 + 1.3 * (found.pool_s * 1.1 + found.page_cache_s * 1.2 + found.disk_s * 1.3)
    assert found.decode.low == pytest.approx(1 / slow)
    assert found.hit_rate == 0.75


def test_a_token_and_its_look_ups_cost_something_of_their_own() -> None:
    before = predict(work(), Fixed(), RATES).compute_s
    dearer = replace(RATES, token_s=3e-4, lookup_s=1e-5)
    slots = (32,) * 4 + (31, 16, 8, 8, 4, 1)
    assert predict(work(slots=slots), Fixed(), dearer).compute_s - before == pytest.approx(3e-4 + 6 * 1e-5)
    assert predict(work(slots=(32,) * 10), Fixed(), dearer).compute_s - before == pytest.approx(3e-4)
    assert MachineRates.from_dict(dearer.as_dict()) == dearer


def test_without_misses_only_computing_costs() -> None:
    found = predict(work(), Fixed(low=0.0, expected=0.0, high=0.0, bytes=0.0), RATES)
    assert found.decode.predicted == pytest.approx(1 / found.compute_s)
    assert found.pool_s == found.page_cache_s == found.disk_s == 0


@given(st.integers(1, 32), st.floats(0, 1), st.integers(0, 10**9), st.integers(1, 4096))
def test_ranges_hold_the_prediction_and_more_is_never_slower(
    n: int, cached: float, pool: int, ubatch: int
) -> None:
    hits = FromExperience(DEMANDS)
    shape = ContextShape(8192, ubatch)
    found = predict(work(slots=(n,) * 10, cached_share=cached, pool_bytes=pool, shape=shape), hits, RATES)
    for speed in (found.decode, found.prefill):
        assert 0 < speed.low <= speed.predicted <= speed.high
    more = predict(work(slots=(min(n + 4, 32),) * 10, cached_share=cached, shape=shape), hits, RATES)
    none = predict(work(slots=(n,) * 10, cached_share=cached, shape=shape), hits, RATES)
    assert more.decode.predicted >= none.decode.predicted * (1 - 1e-9)
    assert more.prefill.predicted >= none.prefill.predicted * (1 - 1e-9)


def test_a_larger_batch_of_a_prompt_is_worth_more_where_experts_must_come() -> None:
    hits = FromExperience(DEMANDS)
    speeds = [
        predict(
            work(slots=(2,) * 10, cached_share=0.0, shape=ContextShape(8192, n)), hits, RATES
        ).prefill.predicted
        for n in (16, 128, 1024)
    ]
    assert speeds == sorted(speeds)


def test_rates_go_there_and_back() -> None:
    assert MachineRates.from_dict(RATES.as_dict()) == RATES
    with pytest.raises(KeyError):
        MachineRates.from_dict({})
    with pytest.raises(TypeError):
        MachineRates.from_dict(RATES.as_dict() | {"pool": {"speed": 1}})
