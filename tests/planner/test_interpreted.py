"""Compiled and interpreted policy are the same: one seeded run in each, every slot and victim compared."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np

from expertier.planner import PolicyKind
from expertier.planner.residency import ARRAYS, Residency


def run(seed: int, kind: str) -> dict[str, object]:
    """Make random calls; return what they answered, who was evicted and a digest of all tables at the end."""
    rng = np.random.default_rng(seed)
    residency = Residency([24, 6], [7, 4], PolicyKind(kind))
    statuses: list[int] = []
    victims: list[int] = []
    held: list[tuple[int, np.ndarray]] = []
    for _ in range(1500):
        layer = int(rng.integers(2))
        experts = rng.permutation(int(residency.n_experts[layer]))[: int(rng.integers(1, 5))].astype(np.int32)
        slots = np.full(len(experts), -1, np.int32)
        statuses.append(residency.resident_first(layer, experts))
        statuses.append(residency.begin(layer, experts, slots, np.zeros(len(experts), np.int32)))
        if statuses[-1] >= 0:
            victims += residency.evicted_from(layer, slots)
            if rng.random() < 0.9:
                residency.complete(layer, slots)
                held.append((layer, slots))
            else:
                residency.abort(layer, slots)
        while len(held) > 2:
            statuses.append(residency.release(*held.pop(int(rng.integers(len(held))))))
        if rng.random() < 0.02:
            statuses.append(residency.release(0, np.array([9], np.int32)))
    residency.check_valid()
    digest = hashlib.sha256(b"".join(getattr(residency, name).tobytes() for name in ARRAYS)).hexdigest()
    return {"statuses": statuses, "victims": victims, "digest": digest}


def test_compiled_and_interpreted_choose_the_same_victims() -> None:
    cases = [(seed, str(kind)) for seed in range(3) for kind in PolicyKind]
    child = subprocess.run(
        [sys.executable, __file__, json.dumps(cases)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    interpreted = json.loads(child.stdout)
    assert interpreted["compiled"] is False
    for case, expected in zip(cases, interpreted["runs"], strict=True):
        found = run(*case)
        assert found == expected, case
        assert len(found["victims"]) > 100, "a run without evictions compares nothing"


if __name__ == "__main__":
    from expertier.planner import policy

    print(
        json.dumps(
            {
                "compiled": hasattr(policy.begin, "signatures"),
                "runs": [run(*case) for case in json.loads(sys.argv[1])],
            }
        )
    )
