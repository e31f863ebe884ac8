"""Compiled and interpreted policy are the same: one seeded run in each, every answer and table compared."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertier.planner import PolicyKind
from expertier.planner.policy.calls.locked_calls import locked_calls
from expertier.planner.policy.repack import choose_survivors
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import COMPILED
from expertier.testing.unlocked_calls import unlocked
from expertier.tiers.shared.layer_locks import LayerLocks
from policy_runs.residency_arrays import ARRAYS

SUPPORT = Path(__file__).parents[2] / "support"


def run(seed: int, kind: str) -> dict[str, object]:
    """Make random calls; return what they answered, who was evicted and digests of all tables on the way."""
    rng = np.random.default_rng(seed)
    residency = Residency([24, 6], [7, 4], PolicyKind(kind))
    locks = LayerLocks(2)
    calls = locked_calls()
    answers: list[int] = []
    victims: list[int] = []
    digests: list[str] = []
    held: list[tuple[int, np.ndarray]] = []
    for step in range(4000):
        layer = int(rng.integers(2))
        # Routing with a few favourites, which change now and then.
        favourite = (np.arange(24) + step // 500 * 5) % int(residency.n_experts[layer])
        wanted = favourite[np.unique(rng.geometric(0.3, int(rng.integers(1, 5))) % len(favourite))]
        experts = np.unique(wanted).astype(np.int32)
        slots = np.full(len(experts), -1, np.int32)
        action = rng.random()
        if action < 0.15:
            slot = unlocked(residency).begin_prefetch(layer, int(experts[0]))
            answers.append(slot)
            slots = np.array([slot], np.int32)
        elif action < 0.4:
            marked = np.append(slots, np.int32(0))
            answers.append(
                calls.try_pin_hits(residency.directory_address, locks.address, layer, experts, marked)
            )
            if answers[-1] == 0:
                held.append((layer, marked[:-1]))
            continue
        else:
            answers.append(unlocked(residency).resident_first(layer, experts))
            answers.append(unlocked(residency).begin(layer, experts, slots, np.zeros(len(experts), np.int32)))
        if answers[-1] >= 0:
            victims += residency.experts_evicted_by(layer, slots)
            if rng.random() < 0.9:
                answers.append(unlocked(residency).complete(layer, slots))
                held.append((layer, slots))
            else:
                answers.append(unlocked(residency).abort(layer, slots))
        while len(held) > 2:
            taken = held.pop(int(rng.integers(len(held))))
            marked = np.append(taken[1], np.int32(1))
            answers.append(
                calls.try_release_held(residency.directory_address, locks.address, taken[0], marked)
            )
        if rng.random() < 0.02:
            answers.append(unlocked(residency).release(0, np.array([99], np.int32)))
        if step % 200 == 199:
            for taken in held:
                answers.append(unlocked(residency).release(*taken))
            held.clear()
            n_slots = [int(n) for n in rng.integers((4, 2), (12, 6))]
            shift = int(rng.integers(-2, 3))
            survivors = choose_survivors(residency, n_slots, [shift, None])
            residency.repack(n_slots, survivors)
            if step % 1000 == 999:
                residency.seed_heat(rng.integers(0, 50, residency.heat.shape))
            residency.check_valid()
            state = b"".join(getattr(residency, name).tobytes() for name in ARRAYS)
            digests.append(hashlib.sha256(state).hexdigest())
    locks.close()
    return {"answers": answers, "victims": victims, "digests": digests}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
def test_compiled_and_interpreted_choose_the_same_victims(seed: int) -> None:
    cases = [(seed, str(kind)) for kind in PolicyKind]
    path = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, __file__, json.dumps(cases)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    interpreted = json.loads(child.stdout)
    assert interpreted["compiled"] is False
    for case, expected in zip(cases, interpreted["runs"], strict=True):
        found = run(*case)
        assert found == expected, case
        assert len(found["victims"]) > 100, "a run without evictions compares nothing"


if __name__ == "__main__":
    runs = [run(*case) for case in json.loads(sys.argv[1])]
    print(json.dumps({"compiled": COMPILED, "runs": runs}))
