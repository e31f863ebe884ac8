"""How fast a replay is, against the compiled policy's calls alone on the same look-ups, in one run.

`python benchmarks/policy/replay_speed.py TRACES [--json]`, with the folder that holds `gptoss20b` and `bigmoe_route`.
By itself, the policy gets each call in a loop of `begin`, `complete` where something was missing, and `release`, over
experts that are laid out for it: what `benchmarks/policy/lookup.py` measures. The replay is what `expertier replay`
runs. The two take turns, and a ratio is of one round. Medians of the rounds (smallest to largest).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from numba import njit

from expertier.planner import PolicyKind
from expertier.planner.policy.calls import c_calls
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import COMPLETE, RELEASE
from expertier.planner.replay.calls import make_calls, make_counts, make_pool
from expertier.planner.replay.policy import play_calls
from expertier.planner.replay.run import BELADY, GLOBAL_LRU, l1_of_slots, replay
from expertier.planner.traces.file import read_trace
from expertier.planner.traces.trace import Phase, Trace

ROUNDS = 9
GPT_OSS_20B_EXPERT_BYTES = 13_219_200


@njit
def calls_alone(directory, layers, steps, slots, miss_index):
    """Run every call of `steps` (int32 [calls, top-k]) through the policy; returns the misses."""
    misses = 0
    for i in range(steps.shape[0]):
        found = c_calls.begin(directory, layers[i], steps[i], slots, miss_index)
        if found > 0:
            misses += found
            c_calls.on_slots(directory, COMPLETE, layers[i], slots)
        c_calls.on_slots(directory, RELEASE, layers[i], slots)
    return misses


def measure(name: str, trace: Trace, n_slots: int, kind: PolicyKind, pool_slots: int) -> dict[str, object]:
    """Time both sides over a trace whose calls all have as many experts."""
    l1 = l1_of_slots(trace, n_slots)
    ascending = trace.ascending()
    steps = np.ascontiguousarray(ascending.reshape(trace.n_calls, -1))
    buffers = [np.zeros(steps.shape[1], np.int32) for _ in range(2)]
    calls = make_calls(trace, ascending, l1.n_slots)
    pool_bytes = pool_slots * int(trace.expert_bytes.max())
    alone, replayed, ratios = [], [], []
    for number in range(ROUNDS + 1):
        tables = [Residency(trace.n_experts.tolist(), l1.n_slots, kind) for _ in range(2)]
        start = time.perf_counter()
        misses = calls_alone(tables[0].directory_address, trace.layer, steps, *buffers)
        middle = time.perf_counter()
        counts, pool = make_counts(trace.n_layers), make_pool(trace, pool_bytes)
        prepared = time.perf_counter()
        play_calls(tables[1], calls, pool, counts, 0, trace.n_calls)
        end = time.perf_counter()
        assert tables[1].totals()["misses"] == misses, "both sides play the same"
        if number:  # the first round compiles
            alone.append(middle - start)
            replayed.append(end - prepared)
            ratios.append((end - prepared) / (middle - start))
    lookups = len(ascending)
    return {
        "trace": name,
        "policy": kind.value,
        "slots": n_slots,
        "pool_slots": pool_slots,
        "hit_rate": 1 - misses / lookups,
        "alone_lookups_per_s": lookups / statistics.median(alone),
        "replay_lookups_per_s": lookups / statistics.median(replayed),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def decode_of(trace: Trace) -> Trace:
    """Return the decode steps of a recording."""
    first = int(np.flatnonzero(trace.phase == Phase.DECODE)[0])
    return trace.section(first, trace.n_calls)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    gptoss20b = read_trace(options.traces / "gptoss20b" / "gptoss20b_ids_only.npz")
    gptoss20b = gptoss20b.section(0, int(gptoss20b.sequences[60])).with_bytes(GPT_OSS_20B_EXPERT_BYTES)
    qwen = decode_of(read_trace(options.traces / "bigmoe_route" / "qwen.route.csv"))
    rows = [
        measure(name, trace, n_slots, kind, pool_slots)
        for name, trace, cases in (
            ("gptoss20b, 60 sequences", gptoss20b, ((8, 0), (16, 0), (32, 0), (8, 400))),
            ("qwen, decode", qwen, ((16, 0), (64, 0), (128, 0), (16, 2000))),
        )
        for n_slots, pool_slots in cases
        for kind in (PolicyKind.LRU, PolicyKind.LFU_DECAY)
    ]
    others = [
        {
            "policy": name,
            "slots": 8,
            "lookups_per_s": replay(gptoss20b, l1_of_slots(gptoss20b, 8), name).lookups_per_s,
        }
        for name in (GLOBAL_LRU, BELADY)
    ]
    if options.json:
        print(json.dumps({"policies": rows, "others": others}))
        return
    for row in rows:
        print(
            f"{row['trace']}, {row['policy']}, {row['slots']} slots, L2 of {row['pool_slots']}: "
            f"{100 * row['hit_rate']:.1f} % hits, {row['replay_lookups_per_s'] / 1e6:.1f} M look-ups/s, calls alone "
            f"{row['alone_lookups_per_s'] / 1e6:.1f} M: {row['ratio']:.2f} times the calls' time "
            f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        )
    for row in others:
        print(f"{row['policy']}, {row['slots']} slots: {row['lookups_per_s'] / 1e6:.1f} M look-ups/s")


if __name__ == "__main__":
    main()
