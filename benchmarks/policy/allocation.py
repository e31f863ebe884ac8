"""How long it takes to plan the slots of large models, with a profile and without.

python benchmarks/policy/allocation.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import numpy as np

from expertier.planner import LayerDemand, plan_layers
from expertier.planner.budget.allocate import floor_bytes, full_bytes

_ROUNDS = 15


def main() -> None:
    """Time plans of several sizes and print the medians in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for n_layers, n_experts in ((24, 32), (48, 128), (100, 512)):
        demands = [
            LayerDemand(
                layer=i, n_experts=n_experts, top_k=8, slot_bytes=(4, 5, 6)[i % 3] << 20, fixed_bytes=640
            )
            for i in range(n_layers)
        ]
        random = np.random.default_rng(0)
        profile = random.zipf(1.5, (n_layers, n_experts)).clip(0, 10_000).astype(np.float64)
        budget = (floor_bytes(demands) + full_bytes(demands)) // 2
        for name, work in (
            ("uniform", lambda d=demands, b=budget: plan_layers(d, budget_bytes=b)),
            ("profile", lambda d=demands, b=budget, p=profile: plan_layers(d, budget_bytes=b, profile=p)),
        ):
            times = []
            for _ in range(_ROUNDS):
                start = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - start))
            rows.append(
                {
                    "layers": n_layers,
                    "experts": n_experts,
                    "plan": name,
                    "ms": median(times),
                    "most_ms": max(times),
                }
            )
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        size = f"{row['layers']:4d} x {row['experts']:3d}"
        print(f"{size}  {row['plan']:16s} {row['ms']:7.2f} ms (at most {row['most_ms']:.2f})")


if __name__ == "__main__":
    main()
