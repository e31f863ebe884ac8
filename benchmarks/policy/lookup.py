"""How long a look-up takes in compiled code: begin and release, and complete where experts were missing.

`python benchmarks/policy/lookup.py [--policy NAME] [--json]` prints microseconds a layer call for several shares of
hits: the median and range of several rounds, in the thread's own time, so that other work counts for less. It is the
code that the engine's threads call, in a compiled loop without Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from numba import njit

from expertier.planner.policy.calls import c_calls
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import COMPLETE, RELEASE

EXPERTS, SLOTS, TOP_K = 128, 64, 8
CALLS, ROUNDS = 20_000, 9


@njit
def look_up(directory, layer, steps, slots, miss_index):
    """Run every row of `steps` (int32 [calls, top-k]) through the policy; returns the misses."""
    misses = 0
    for i in range(steps.shape[0]):
        found = c_calls.begin(directory, layer, steps[i], slots, miss_index)
        if found > 0:
            misses += found
            c_calls.on_slots(directory, COMPLETE, layer, slots)
        c_calls.on_slots(directory, RELEASE, layer, slots)
    return misses


def measure(hot: int, kind: PolicyKind) -> dict[str, float]:
    """Route uniformly over `hot` experts with 64 slots: all hit up to 64, a share misses above."""
    residency = Residency([EXPERTS], [SLOTS], kind)
    random = np.random.default_rng(hot)
    steps = np.array([random.permutation(hot)[:TOP_K] for _ in range(CALLS)], np.int32)
    slots, miss_index = np.zeros(TOP_K, np.int32), np.zeros(TOP_K, np.int32)
    arguments = (residency.directory_address, 0, steps, slots, miss_index)
    look_up(*arguments)  # compiles, and fills the slots
    times, misses = [], 0
    for _ in range(ROUNDS):
        start = time.thread_time()
        misses = look_up(*arguments)
        times.append((time.thread_time() - start) / CALLS * 1e6)
    return {
        "hit_rate": 1 - misses / (CALLS * TOP_K),
        "us_median": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="lfu-decay", choices=[kind.value for kind in PolicyKind])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(hot, PolicyKind(options.policy)) for hot in (64, 96, 128)]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"top-{TOP_K} of {EXPERTS} experts, {SLOTS} slots; microseconds a layer call, {ROUNDS} rounds")
    for row in rows:
        print(
            f"  {100 * row['hit_rate']:5.1f} % hits: {row['us_median']:.3f} "
            f"({row['us_min']:.3f} to {row['us_max']:.3f})"
        )


if __name__ == "__main__":
    main()
