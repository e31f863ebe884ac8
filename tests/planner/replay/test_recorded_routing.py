"""Hit rates on recorded gpt-oss-20b routing: the default policy still beats LRU by what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import PolicyKind
from expertier.planner.policy.residency import Residency
from policy_runs.played_steps import play

TRACE = Path(__file__).parents[3].parent / "shared" / "traces" / "gptoss20b" / "gptoss20b_ids_only.npz"
N_EXPERTS = 32
N_LAYERS = 24
SEQUENCES = np.random.default_rng(0).choice(560, 14, replace=False)


@pytest.fixture(scope="module")
def sequences() -> list[npt.NDArray[np.int32]]:
    """Decode steps of a few thousand tokens, by sequence: [tokens, layers, 4] each."""
    if not TRACE.exists():
        pytest.skip(f"recorded routing is not there: {TRACE}")
    with np.load(TRACE) as trace:
        ids, offsets = trace["ids"], trace["offsets"]
        return [np.ascontiguousarray(ids[offsets[i] : offsets[i + 1]].astype(np.int32)) for i in SEQUENCES]


def hit_percent(sequences: list[npt.NDArray[np.int32]], n_slots: int, kind: PolicyKind) -> float:
    """Replay single-row decode, each sequence from cold."""
    hits = requests = 0
    for sequence in sequences:
        residency = Residency([N_EXPERTS] * N_LAYERS, [n_slots] * N_LAYERS, kind)
        play(residency, sequence)
        totals = residency.totals()
        hits += totals["hits"]
        requests += totals["hits"] + totals["misses"]
    return 100 * hits / requests


@pytest.mark.parametrize(("n_slots", "lfu", "lru"), [(8, 69.44, 65.25), (16, 91.25, 89.17)])
def test_lfu_with_decay_hits_more_than_lru(
    sequences: list[npt.NDArray[np.int32]], n_slots: int, lfu: float, lru: float
) -> None:
    found = (
        hit_percent(sequences, n_slots, PolicyKind.LFU_DECAY),
        hit_percent(sequences, n_slots, PolicyKind.LRU),
    )
    assert found == (pytest.approx(lfu, abs=0.01), pytest.approx(lru, abs=0.01))
    assert found[0] > found[1] + 1
