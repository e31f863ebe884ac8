"""Hit rates of recordings by the share of the experts in slots; plans without a recording are made from them.

    python benchmarks/policy/hit_curve.py TRACE [TRACE ...] [--json]

The shipped policy, from empty slots, all sequences one after another (at most 3 million look-up calls of a file).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from expertier.planner.policy.kind import PolicyKind
from expertier.planner.replay import run
from expertier.planner.traces.file import read_trace

_SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


def main() -> None:
    """Replay each file at each share and print the hit rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for path in arguments.traces:
        trace = read_trace(path)
        n_experts = int(trace.n_experts.max())
        rates = {}
        for share in _SHARES:
            n_slots = max(round(share * n_experts), 1)
            result = run.replay(trace, run.l1_of_slots(trace, n_slots), PolicyKind.LFU_DECAY.value)
            rates[n_slots / n_experts] = result.decode_hit_rate
        row = {
            "trace": path.name,
            "experts": n_experts,
            "top_k": int(np.median(trace.lengths)),
            "hit_rates": rates,
        }
        rows.append(row)
        if not arguments.json:
            shown = ", ".join(f"{share:.4f}: {100 * (rate or 0):.1f}" for share, rate in rates.items())
            print(f"{path.name} ({n_experts} experts, top-{row['top_k']}): {shown}", flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
