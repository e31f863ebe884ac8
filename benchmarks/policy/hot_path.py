"""What a look-up costs: the compiled policy through its C function pointers against C++ written by hand.

`python benchmarks/policy/hot_path.py [--json]`. Both sides run in one loop of C++ (`hot_path.cpp`, compiled at the
start for this machine), over the same calls: decode through 48 layers, top-8 of 128 experts, 64 slots, each call
a look-up and a release, and a completion where something was missing.

    hit_us, hit_ratio     all hit; by hand: the same look-ups and counter updates
    miss_us, miss_ratio   half missing; by hand: an LRU with a linked list
    acquire_us, acquire_ratio
                          from Python: TierManager.acquire and release of 8 experts that are all there, against
                          one NumPy gather with the same ids

Times are microseconds of the thread's own time a layer call, the median of many short rounds. A ratio is the median of
the rounds' own ratios, as both sides of a round run one right after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

import expertier as et
from expertier.added_flags import CPP_VARIABLE, added_flags
from expertier.planner.policy.calls.native import entry_points
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.testing import LayerShape, PatternSource, synthetic_table

LAYERS, EXPERTS, SLOTS, TOP_K = 48, 128, 64, 8
STEPS, ROUNDS = 100, 201
HOT = {"hit": SLOTS, "miss": EXPERTS}
"""How many experts the routing draws from, evenly: as many as there are slots, or all of them."""

SOURCE = Path(__file__).with_name("hot_path.cpp")


class Run(ctypes.Structure):
    """The struct of the same name in `hot_path.cpp`."""

    _fields_ = (
        ("layers", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("ids", ctypes.c_void_p),
    )


def compile_by_hand(folder: str) -> ctypes.CDLL:
    """Compile `hot_path.cpp` with the system's compiler and load it."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("no C++ compiler found: install one, or name it in CXX")
    library = Path(folder) / "hot_path.so"
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", *added_flags(CPP_VARIABLE)]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for function in (loaded.compiled_policy, loaded.by_hand_hits, loaded.by_hand_lru):
        function.restype = ctypes.c_double
    return loaded


def routing(hot: int) -> np.ndarray:
    """Draw distinct experts for every call, int32 [steps, layers, top-k]."""
    order = np.argsort(np.random.default_rng(hot).random((STEPS, LAYERS, hot)), axis=2)
    return np.ascontiguousarray(order[:, :, :TOP_K].astype(np.int32))


def measure(library: ctypes.CDLL, name: str, kind: PolicyKind) -> dict[str, float]:
    """Time both sides in turns; returns microseconds, ratio and share of misses."""
    ids = routing(HOT[name])
    run = Run(LAYERS, EXPERTS, SLOTS, TOP_K, STEPS, ids.ctypes.data)
    residency = Residency([EXPERTS] * LAYERS, [SLOTS] * LAYERS, kind)
    points = entry_points()
    by_hand = library.by_hand_hits if name == "hit" else library.by_hand_lru
    misses = ctypes.c_int64()

    def compiled_us() -> float:
        pointers = (residency.directory_address, points.begin, points.complete, points.release)
        us = library.compiled_policy(ctypes.byref(run), *map(ctypes.c_void_p, pointers), ctypes.byref(misses))
        assert misses.value >= 0, "the policy refused a call"
        return us

    def by_hand_us() -> float:
        us = by_hand(ctypes.byref(run), ctypes.byref(misses))
        assert misses.value >= 0, "the code written by hand refused a call"
        return us

    compiled_us()  # fills the slots
    residency_misses = residency.totals()["misses"]
    rounds = []
    for turn in range(ROUNDS):
        if turn % 2:
            by_hand_first = by_hand_us()
            rounds.append((compiled_us(), by_hand_first))
        else:
            rounds.append((compiled_us(), by_hand_us()))
    looked_up = ROUNDS * ids.size
    return {
        f"{name}_us": statistics.median(us for us, _ in rounds),
        f"{name}_ratio": statistics.median(us / hand for us, hand in rounds),
        f"{name}_by_hand_us": statistics.median(hand for _, hand in rounds),
        f"{name}_missing": (residency.totals()["misses"] - residency_misses) / looked_up,
    }


def measure_acquire() -> dict[str, float]:
    """Time `acquire` and `release` in Python against a gather, in turns."""
    table = synthetic_table([LayerShape(n_experts=EXPERTS)] * LAYERS, top_k=TOP_K)
    budget = sum(demand.bytes_for(SLOTS) for demand in table.layer_demands())
    config = et.TierConfig(expert_cache_bytes=budget, host_pool_bytes=0, fill_threads=0)
    ids = routing(SLOTS)
    slot_of = np.arange(EXPERTS, dtype=np.int32)
    calls = [(layer, ids[step, layer]) for step in range(10) for layer in range(LAYERS)]
    rounds = []
    with (
        et.open_device("host") as device,
        et.TierManager(table, device=device, config=config, source=PatternSource()) as tiers,
    ):
        for layer in range(LAYERS):
            tiers.acquire(layer, np.arange(SLOTS, dtype=np.int32)).release()
        misses = tiers.stats().l1.misses
        for _ in range(ROUNDS):
            begin = time.thread_time_ns()
            for layer, wanted in calls:
                tiers.acquire(layer, wanted).release()
            between = time.thread_time_ns()
            for _, wanted in calls:
                slot_of[wanted]
            rounds.append((between - begin, time.thread_time_ns() - between))
        assert tiers.stats().l1.misses == misses, "not all were hits"
    return {
        "acquire_us": statistics.median(ns for ns, _ in rounds) / len(calls) / 1e3,
        "acquire_ratio": statistics.median(ns / gather for ns, gather in rounds),
        "gather_us": statistics.median(gather for _, gather in rounds) / len(calls) / 1e3,
    }


def measure_all() -> dict[str, float]:
    """Return everything, for the default policy."""
    with tempfile.TemporaryDirectory() as folder:
        library = compile_by_hand(folder)
        found: dict[str, float] = {}
        for name in HOT:
            found |= measure(library, name, PolicyKind.LFU_DECAY)
    return found | measure_acquire()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure_all()
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))
        return
    print(f"{LAYERS} layers, top-{TOP_K} of {EXPERTS} experts, {SLOTS} slots; microseconds a layer call")
    for name, words in (("hit", "all hit"), ("miss", "half missing")):
        print(
            f"  {words:13} {found[f'{name}_us']:.3f} compiled, {found[f'{name}_by_hand_us']:.3f} by hand: "
            f"{found[f'{name}_ratio']:.2f} times ({100 * found[f'{name}_missing']:.1f} % of look-ups missing)"
        )
    print(
        f"  from Python   {found['acquire_us']:.2f} to acquire and release, {found['gather_us']:.2f} to gather: "
        f"{found['acquire_ratio']:.2f} times"
    )


if __name__ == "__main__":
    main()
