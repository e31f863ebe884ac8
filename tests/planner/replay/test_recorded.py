"""Replays of real recordings: they give what the recording devices saw, and the policies' known margins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertier.planner import PolicyKind
from expertier.planner.replay.run import BELADY, GLOBAL_LRU, compare, l1_of_budget, l1_of_slots, replay
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.trace import Phase, Trace, trace_from_ids
from expertier.units import MIB

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"


def recorded(*names: str) -> Trace:
    """Read a recording, which is not part of the repository; skips the test where it is not there."""
    path = TRACES.joinpath(*names)
    if not path.exists():
        pytest.skip(f"recorded routing is not there: {path}")
    trace = read_trace(path)
    trace.check_valid()
    return trace


@pytest.mark.parametrize(
    ("name", "budget_mib", "decode_percent"),
    [("qwen", 4000, 80.3), ("gemma", 4000, 81.9), ("gptoss", 3000, 44.8)],
)
def test_one_global_lru_hits_as_the_device_did(name: str, budget_mib: int, decode_percent: float) -> None:
    trace = recorded("bigmoe_route", f"{name}.route.csv")
    found = replay(trace, l1_of_budget(trace, budget_mib * MIB), GLOBAL_LRU)
    assert found.decode_hit_rate is not None
    assert 100 * found.decode_hit_rate == pytest.approx(decode_percent, abs=0.2)
    # And as the file's own column says, look-up by look-up in sum.
    assert trace.resident is not None
    decode = np.repeat(trace.phase == Phase.DECODE, trace.lengths)
    assert found.decode_hit_rate == pytest.approx(float(trace.resident[decode].mean()), abs=0.002)


@pytest.fixture(scope="module")
def gptoss20b() -> Trace:
    """14 sequences drawn at random, as in test_recorded_routing.py."""
    whole = recorded("gptoss20b", "gptoss20b_ids_only.npz")
    ids = whole.experts.reshape(-1, 24, 4)
    begins = whole.sequences // 24
    chosen = np.random.default_rng(0).choice(560, 14, replace=False)
    pieces = [ids[begins[i] : begins[i + 1]] for i in chosen]
    return trace_from_ids(np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]), n_experts=32)


@pytest.mark.parametrize(("n_slots", "margin", "share"), [(8, 3.6, 0.25), (16, 1.8, 0.25)])
def test_lfu_decay_is_above_lru_by_the_known_margins(
    gptoss20b: Trace, n_slots: int, margin: float, share: float
) -> None:
    (lru, _), (lfu, closed), (optimum, _) = compare(
        gptoss20b,
        l1_of_slots(gptoss20b, n_slots),
        [PolicyKind.LRU, PolicyKind.LFU_DECAY, BELADY],
        each_from_cold=True,
    )
    assert lru.hit_rate is not None
    assert lfu.hit_rate is not None
    assert optimum.hit_rate is not None
    assert 100 * (lfu.hit_rate - lru.hit_rate) == pytest.approx(margin, abs=0.7)
    assert optimum.hit_rate > lfu.hit_rate
    assert closed is not None
    assert closed > share
