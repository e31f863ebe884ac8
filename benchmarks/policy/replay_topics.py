"""What harder decay at a change of topic is worth: recorded routing with changes, and without.

`python benchmarks/policy/replay_topics.py TRACES/gptoss20b/gptoss20b_ids_only.npz [--json]` plays 100 sequences of
gpt-oss-20b that were not used to choose the constants, through the policy as it ships. Three ways: one after another (a
change of topic every few hundred steps), pieces of 64 steps one after another (changes all the time), and each from
cold (no change). Beside it LRU, LFU-decay with one pace of decay, and that with all heat dropped at each change, which
only a replay can know. Hits in percent.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from numba import njit

from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.replay.calls import make_calls, make_counts, make_pool
from expertier.planner.replay.policy import play_calls
from expertier.planner.traces.trace import trace_from_ids

N_EXPERTS, N_LAYERS = 32, 24
HELD_OUT = np.random.default_rng(1).permutation(560)[200:300]
PIECE, SKIPPED = 64, 40  # a piece is taken after the prompt's echo

Pieces = list[np.ndarray]


@njit
def plain_lfu(pieces_end, steps, n_experts, n_slots, drop_heat):
    """Count the misses of LFU-decay with one pace, written anew: +16 a use, at most 255, halved every 20 steps."""
    misses = 0
    for layer in range(steps.shape[1]):
        heat, last = np.zeros(n_experts, np.int64), np.zeros(n_experts, np.int64)
        there = np.zeros(n_experts, np.bool_)
        piece = 0
        for t in range(steps.shape[0]):
            if t == pieces_end[piece]:
                piece += 1
                if drop_heat:
                    heat[:] = 0
            if (t + 1) % 20 == 0:
                heat >>= 1
            asked = steps[t, layer]
            for expert in asked:
                heat[expert] = min(heat[expert] + 16, 255)
                if there[expert]:
                    last[expert] = t
            for expert in asked:
                if there[expert]:
                    continue
                misses += 1
                if there.sum() == n_slots:
                    victim = -1
                    for other in range(n_experts):
                        if (there[other] and not (asked == other).any()) and (
                            victim < 0
                            or heat[other] < heat[victim]
                            or (heat[other] == heat[victim] and last[other] < last[victim])
                        ):
                            victim = other
                    there[victim] = False
                there[expert] = True
                last[expert] = t
    return misses


def shipped(pieces: Pieces, n_slots: int, kind: PolicyKind) -> int:
    """Count the misses of a policy as it ships."""
    residency = Residency([N_EXPERTS] * N_LAYERS, [n_slots] * N_LAYERS, kind)
    trace = trace_from_ids(np.concatenate(pieces), n_experts=N_EXPERTS)
    calls = make_calls(trace, trace.experts, [n_slots] * N_LAYERS)
    play_calls(residency, calls, make_pool(trace, 0), make_counts(N_LAYERS), 0, trace.n_calls)
    return residency.totals()["misses"]


def plain(pieces: Pieces, n_slots: int, *, drop_heat: bool) -> int:
    """Count the misses of `plain_lfu`."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(plain_lfu(ends, np.concatenate(pieces), N_EXPERTS, n_slots, drop_heat))


def row(groups: list[Pieces], n_slots: int) -> dict[str, float]:
    """Return hits in percent; each group starts from cold."""
    requests = sum(piece.size for pieces in groups for piece in pieces)
    counts = {
        "lru": sum(shipped(pieces, n_slots, PolicyKind.LRU) for pieces in groups),
        "lfu_one_pace": sum(plain(pieces, n_slots, drop_heat=False) for pieces in groups),
        "lfu_decay": sum(shipped(pieces, n_slots, PolicyKind.LFU_DECAY) for pieces in groups),
        "lfu_told_of_changes": sum(plain(pieces, n_slots, drop_heat=True) for pieces in groups),
    }
    return {name: round(100 * (1 - misses / requests), 2) for name, misses in counts.items()}


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with np.load(options.trace) as trace:
        ids, offsets = trace["ids"], trace["offsets"]
        sequences = [np.ascontiguousarray(ids[offsets[i] : offsets[i + 1]], np.int32) for i in HELD_OUT]
    pieces = [s[SKIPPED : SKIPPED + PIECE] for s in sequences if len(s) >= SKIPPED + PIECE]
    routes = {
        "one after another": [sequences],
        "64 steps each": [pieces],
        "each from cold": [[sequence] for sequence in sequences],
    }
    rows = [
        {"slots": n_slots, "route": name, **row(groups, n_slots)}
        for n_slots in (8, 16, 24)
        for name, groups in routes.items()
    ]
    if options.json:
        print(json.dumps(rows))
        return
    names = list(rows[0])
    print(f"gpt-oss-20b, {len(sequences)} sequences, {sum(map(len, sequences))} steps; hits in percent")
    print("".join(f"{name:>20}" for name in names))
    for found in rows:
        print("".join(f"{found[name]!s:>20}" for name in names))


if __name__ == "__main__":
    main()
