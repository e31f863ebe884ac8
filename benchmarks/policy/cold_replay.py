"""What a fresh process misses, token by token, by a replay: from L2 or the file, with a routing profile or without.

    python benchmarks/policy/cold_replay.py --trace FILE [--begin STEP ...] [--slots N ...] [--pool PERCENT ...]

The profile is made of the earlier steps. `slots` is a warm start that fills only the slots, and `slots, L2` one that
then fills L2, as `TierManager.warm_start` does. All experts that a profile asks for are loaded at the first token. With
`+ filling`, L2 is filled from the file meanwhile (`tiers/fill/pool_filling.py`), by `--rate` experts in each token that
reads no expert itself, as a token that reads leaves no time. `--opening` experts are loaded before the first token.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.models.trace_ids import read_trace_ids
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.profiles.profile import beyond_slots, warm_order
from expertier.testing.unlocked_calls import unlocked

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

WINDOW = 50

FILLED = " + filling"
STARTS = ("no profile", "no profile" + FILLED, "slots", "slots, L2", "slots, L2" + FILLED)


class Pool:
    """L2: the copies used longest ago go first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._copies: OrderedDict[tuple[int, int], None] = OrderedDict()

    def fill(self, order: Iterator[tuple[int, int]], residency: Residency, n: int) -> None:
        """Bring the next `n` experts of `order` that have no copy and no slot, into free room only."""
        for layer, expert in order if n else ():
            if len(self._copies) >= self._room:
                return
            if (layer, expert) in self._copies or residency.slot_of[layer, expert] >= 0:
                continue
            self._copies[layer, expert] = None
            self._copies.move_to_end((layer, expert), last=False)
            n -= 1
            if not n:
                return

    def has(self, layer: int, expert: int) -> bool:
        """Whether there is a copy."""
        return (layer, expert) in self._copies

    def take(self, layer: int, expert: int) -> bool:
        """Ensure that there is a copy; return False where it had to be read from the file."""
        there = (layer, expert) in self._copies
        self._copies[layer, expert] = None
        self._copies.move_to_end((layer, expert))
        if len(self._copies) > self._room:
            self._copies.popitem(last=False)
        return there

    def touch(self, layer: int, expert: int) -> None:
        """Note that L1 evicted it."""
        if (layer, expert) in self._copies:
            self._copies.move_to_end((layer, expert))


@dataclass(frozen=True)
class Filling:
    """How many experts the background loads: before the first token, and during each token that reads none itself."""

    before: int = 0
    per_token: float = 0.0


def replay(
    ids: I32, uses: F64 | None, n_slots: int, room: int, *, fills_pool: bool, filling: Filling
) -> tuple[F64, F64]:
    """Return the misses of each token, and how many of them go to the file; `uses` is the profile."""
    steps, layers, top_k = ids.shape
    n_experts = int(ids.max()) + 1 if uses is None else uses.shape[1]
    residency = Residency([n_experts] * layers, [n_slots] * layers, PolicyKind.LFU_DECAY)
    pool = Pool(room)
    if uses is not None:
        residency.seed_heat(uses)
        for layer, expert in zip(*warm_order(uses, [n_slots] * layers), strict=True):
            slot = np.array([unlocked(residency).begin_prefetch(int(layer), int(expert))], np.int32)
            unlocked(residency).complete(int(layer), slot)
            unlocked(residency).release(int(layer), slot)
            pool.take(int(layer), int(expert))
        if fills_pool:
            for layer, expert in list(zip(*beyond_slots(uses, [n_slots] * layers), strict=True))[:room]:
                pool.take(int(layer), int(expert))
    order = iter([(layer, expert) for expert in range(n_experts) for layer in range(layers)])
    pool.fill(order, residency, filling.before)
    due = 0.0
    slots, missing = np.empty(top_k, np.int32), np.empty(top_k, np.int32)
    misses, reads = np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        for layer in range(layers):
            experts = np.sort(ids[step, layer])
            n = unlocked(residency).begin(layer, experts, slots, missing)
            for evicted in residency.experts_evicted_by(layer, slots[missing[:n]]):
                pool.touch(layer, evicted)
            asked = [int(experts[i]) for i in missing[:n]]
            asked.sort(key=lambda expert: not pool.has(layer, expert))
            reads[step] += sum(not pool.take(layer, expert) for expert in asked)
            misses[step] += n
            if n:
                unlocked(residency).complete(layer, slots)
            unlocked(residency).release(layer, slots)
        if not reads[step]:
            due += filling.per_token
            pool.fill(order, residency, int(due))
            due -= int(due)
    return misses, reads


def main() -> None:
    """Replay each case and print a line a window."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--begin", type=int, nargs="+", default=[1000, 60000, 120000])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--profile", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 8])
    parser.add_argument(
        "--pool", type=int, nargs="+", default=[100, 25], help="L2, in percent of all experts."
    )
    parser.add_argument("--rate", type=float, default=0.5, metavar="EXPERTS")
    parser.add_argument("--opening", type=int, default=0, metavar="EXPERTS")
    options = parser.parse_args()
    filling = Filling(options.opening, options.rate)
    ids = read_trace_ids(options.trace)
    layers, n_experts = ids.shape[1], int(ids.max()) + 1
    for n_slots in options.slots:
        for percent in options.pool:
            for name in STARTS:
                found = []
                for begin in options.begin:
                    before = ids[begin - options.profile : begin]
                    uses = np.stack(
                        [np.bincount(before[:, n].ravel(), minlength=n_experts) for n in range(layers)]
                    ).astype(np.float64)
                    found.append(
                        replay(
                            ids[begin : begin + options.steps],
                            None if name.startswith("no profile") else uses,
                            n_slots,
                            layers * n_experts * percent // 100,
                            fills_pool=name.startswith("slots, L2"),
                            filling=filling if name.endswith(FILLED) else Filling(),
                        )
                    )
                misses, reads = (np.mean([each[i] for each in found], axis=0) for i in range(2))
                windows = [slice(at, at + WINDOW) for at in range(0, 4 * WINDOW, WINDOW)]
                print(
                    f"{n_slots} slots, L2 {percent} %, {name}: misses a token by windows of {WINDOW} "
                    + ", ".join(f"{misses[part].mean():.1f}" for part in windows)
                    + f", later {misses[4 * WINDOW :].mean():.1f}; from the file "
                    + ", ".join(f"{reads[part].mean():.1f}" for part in windows)
                    + f", later {reads[4 * WINDOW :].mean():.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
