"""Where hit rates come from: recordings, profiles, experience; their ranges, and that they agree with the replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import ConfigError
from expertier.planner import LayerDemand
from expertier.planner.predict.hit_rates import FromExperience, FromProfile, FromTrace
from expertier.planner.profiles.routing_profile import profile_of
from expertier.planner.replay.run import L1, replay
from expertier.planner.traces.trace import Trace, trace_from_ids

LAYERS, EXPERTS, TOP_K = 3, 16, 2


def demands(size: int = 1000) -> list[LayerDemand]:
    return [
        LayerDemand(layer=i, n_experts=EXPERTS, top_k=TOP_K, slot_bytes=size * (i + 1), fixed_bytes=0)
        for i in range(LAYERS)
    ]


@pytest.fixture(scope="module")
def recorded() -> Trace:
    random = np.random.default_rng(0)
    heat, steps = random.standard_normal((LAYERS, EXPERTS)), []
    for _ in range(400):
        heat = 0.9 * heat + 0.4 * random.standard_normal((LAYERS, EXPERTS))
        steps.append(np.argsort(-heat, axis=1)[:, :TOP_K])
    return trace_from_ids(np.array(steps), n_experts=EXPERTS)


def test_a_recording_is_replayed(recorded: Trace) -> None:
    hits = FromTrace(demands(), recorded, from_cold=True)
    found = hits.misses((6, 6, 6))
    expected = replay(recorded, L1((6, 6, 6), 0), "lfu-decay")
    assert found.expected == pytest.approx(expected.misses / 400)
    assert found.hit_rate == pytest.approx(expected.hit_rate)
    assert found.low < found.expected < found.high
    assert found.lookups == LAYERS * TOP_K
    assert found.expected * 1000 < found.bytes < found.expected * 3000, "larger layers weigh more"
    assert FromTrace(demands(), recorded, "belady").misses((6, 6, 6)).expected < found.expected
    assert "lfu-decay" in hits.source


def test_the_first_half_fills_the_slots(recorded: Trace) -> None:
    """Belady apart, whose future is another one in a part: what counts is the second half, after the first."""
    l1 = L1((6, 6, 6), 0)
    whole, first = replay(recorded, l1, "lfu-decay"), replay(recorded.section(0, 600), l1, "lfu-decay")
    found = FromTrace(demands(), recorded).misses((6, 6, 6))
    assert found.expected == pytest.approx((whole.misses - first.misses) / 200)
    assert found.lookups == LAYERS * TOP_K
    everything = FromTrace(demands(), recorded).misses((16, 16, 16))
    assert everything.expected == 0, "in the second half no expert is new"


def test_a_recording_with_another_top_k_is_scaled(recorded: Trace) -> None:
    wider = [replace(demand, top_k=4) for demand in demands()]
    two = FromTrace(demands(), recorded).misses((6, 6, 6))
    four = FromTrace(wider, recorded)
    assert four.misses((6, 6, 6)).expected == pytest.approx(2 * two.expected)
    assert four.misses((6, 6, 6)).hit_rate == pytest.approx(two.hit_rate)
    assert "top-2" in four.source


def test_a_pool_behind_the_slots_serves_some(recorded: Trace) -> None:
    hits = FromTrace(demands(), recorded)
    assert hits.misses((4, 4, 4), 0).pool_share == 0
    small, all_of_it = hits.misses((4, 4, 4), 60_000), hits.misses((4, 4, 4), 10**6)
    assert 0 < small.pool_share < all_of_it.pool_share <= 1
    assert small.expected == all_of_it.expected


def test_a_profile_knows_what_lru_hits(recorded: Trace) -> None:
    known = profile_of(recorded, "p").experts
    assert known is not None
    hits = FromProfile(demands(), known)
    lru = replay(recorded, L1((5, 5, 5), 0), "lru")
    found = hits.misses((5, 5, 5))
    assert found.high == pytest.approx(lru.misses / 400, rel=0.05), "up to the order of experts in a call"
    assert found.low < found.expected < found.high
    assert hits.misses((16, 16, 16)).high <= LAYERS * EXPERTS / 400 + 1e-9, "only first uses miss"
    assert hits.misses((5, 5, 5), 10**6).pool_share > 0.5


@given(st.lists(st.integers(1, EXPERTS), min_size=LAYERS, max_size=LAYERS), st.integers(0, 200_000))
def test_experience_keeps_its_order(slots: list[int], pool: int) -> None:
    hits = FromExperience(demands())
    found = hits.misses(slots, pool)
    assert 0 <= found.low <= found.expected <= found.high <= found.lookups == LAYERS * TOP_K
    assert 0 <= found.pool_share <= 1
    more = hits.misses([min(n + 1, EXPERTS) for n in slots], pool)
    assert more.expected <= found.expected
    assert more.bytes <= found.bytes
    assert hits.misses([EXPERTS] * LAYERS).expected == 0


def test_experience_says_that_it_is_one() -> None:
    assert "other models" in FromExperience(demands()).source


def test_another_model_s_routing_is_refused(recorded: Trace) -> None:
    with pytest.raises(ConfigError, match="the recording is of 3 layers of 16 experts, the model has 2"):
        FromTrace(demands()[:2], recorded)
    known = profile_of(recorded, "p").experts
    assert known is not None
    with pytest.raises(ConfigError, match="the profile is of 3 layers"):
        FromProfile(demands()[:2], known)
    prefill = Trace(
        **{name: getattr(recorded, name) for name in recorded.__slots__} | {"phase": recorded.phase * 0}
    )
    with pytest.raises(ConfigError, match="no decode"):
        FromTrace(demands(), prefill)
