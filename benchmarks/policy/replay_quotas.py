"""What new quotas from observed demand are worth: recorded routing, where it pays and where it does not.

`python benchmarks/policy/replay_quotas.py TRACES [--json]`, with the folder that holds `gptoss20b` and `bigmoe_route`.
Each trace is played through the policy as it ships with equal quotas, and again with `quotas.propose` asked every 32
steps, with a repack when it proposes. The recordings of `bigmoe_route` have 64 or 128 steps of decode each; they are
played 4 times over, as one long run. Of gpt-oss-20b, 16 sequences are played one after another. The misses saved count
what the moves themselves cost, as the slots that a layer gains start empty.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from expertier.planner import LayerDemand, PolicyKind, plan_layers
from expertier.planner.budget.quotas import UseCounts, propose
from expertier.planner.policy.repack import choose_survivors
from expertier.planner.policy.residency import Residency
from expertier.planner.replay.calls import make_calls, make_counts, make_pool
from expertier.planner.replay.policy import play_calls
from expertier.planner.traces.trace import trace_from_ids

ASK_EVERY, SAMPLE_EVERY, REPEATS = 32, 27, 4
SEQUENCES = np.random.default_rng(1).permutation(560)[200:216]


def bigmoe(path: Path) -> tuple[np.ndarray, int]:
    """Read the decode steps of a recording, int32 [steps, layers, top-k], and the bytes of an expert."""
    with open(path) as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    decode = [row for row in rows if row["phase"] == "1"]
    keys = [tuple(int(row[name]) for name in ("turn", "step", "layer", "slot", "expert")) for row in decode]
    table = np.array(sorted(keys), np.int32)
    n_layers, top_k = int(table[:, 2].max()) + 1, int(table[:, 3].max()) + 1
    return np.ascontiguousarray(table[:, 4].reshape(-1, n_layers, top_k)), int(decode[0]["expert_bytes"])


def gptoss20b(path: Path) -> np.ndarray:
    """Read 16 sequences, int32 [steps, 24, 4]."""
    with np.load(path) as trace:
        ids, offsets = trace["ids"], trace["offsets"]
        return np.concatenate([ids[offsets[i] : offsets[i + 1]] for i in SEQUENCES]).astype(np.int32)


def misses(
    steps: np.ndarray, n_experts: int, n_slots: int, slot_bytes: int, *, move: bool
) -> dict[str, object]:
    """Play `steps` from equal quotas; returns the misses, and the moves if there may be some."""
    _, n_layers, top_k = steps.shape
    demands = [
        LayerDemand(layer=layer, n_experts=n_experts, top_k=top_k, slot_bytes=slot_bytes, fixed_bytes=0)
        for layer in range(n_layers)
    ]
    budget = n_layers * n_slots * slot_bytes
    slots = plan_layers(demands, budget_bytes=budget).slots
    residency = Residency([n_experts] * n_layers, slots, PolicyKind.LFU_DECAY)
    counts = UseCounts((n_layers, n_experts))
    trace = trace_from_ids(steps, n_experts=n_experts)
    calls = make_calls(
        trace, trace.experts, [top_k] * n_layers
    )  # no layer has fewer slots than a call has experts
    pool, lookups = make_pool(trace, 0), make_counts(n_layers)
    moves = []
    for t in range(len(steps)):
        play_calls(residency, calls, pool, lookups, t * n_layers, (t + 1) * n_layers)
        if (t + 1) % SAMPLE_EVERY == 0:
            counts.sample(residency.heat, SAMPLE_EVERY)
        if move and (t + 1) % ASK_EVERY == 0:
            proposal = propose(demands, counts, slots, budget_bytes=budget)
            if proposal is not None:
                slots = proposal.plan.slots
                residency.repack(slots, choose_survivors(residency, slots, [None] * n_layers))
                moves.append(t + 1)
    return {"misses": residency.totals()["misses"], "moves": len(moves), "slots": (min(slots), max(slots))}


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [
        (f"{name} {n_slots} of 128", np.tile(steps, (REPEATS, 1, 1)), 128, n_slots, size)
        for name in ("qwen", "gemma", "gptoss")
        for steps, size in [bigmoe(options.traces / "bigmoe_route" / f"{name}.route.csv")]
        for n_slots in (16, 32, 64)
    ]
    long = gptoss20b(options.traces / "gptoss20b" / "gptoss20b_ids_only.npz")
    cases += [(f"gptoss20b {n_slots} of 32", long, 32, n_slots, 13_219_200) for n_slots in (8, 12, 16, 24)]
    rows = []
    for name, steps, n_experts, n_slots, size in cases:
        equal = misses(steps, n_experts, n_slots, size, move=False)
        moved = misses(steps, n_experts, n_slots, size, move=True)
        saved = 100 * (1 - moved["misses"] / equal["misses"])
        low, high = moved["slots"]
        rows.append(
            {
                "trace": name,
                "steps": len(steps),
                "misses_equal": equal["misses"],
                "misses_saved_percent": round(saved, 2),
                "moves": moved["moves"],
                "slots_at_the_end": f"{low} to {high}",
            }
        )
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
