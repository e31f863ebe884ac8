"""Bugs of replays: they play recorded calls as the tiers would, or the tiers as a replay would."""

from __future__ import annotations

from mutants.mutant import Mutant

_AS_TIERS = ("tests/planner/replay/test_replay_as_tiers.py",)
_OPTIMUM = ("tests/planner/replay/test_belady.py",)

REPLAYS = (
    Mutant(
        "a replay's reads push out copies that their own call needs",
        "planner/replay/calls.py",
        "if not touch(pool, base + int(experts[missing[i]])):",
        "if not serve(pool, base + int(experts[missing[i]])):",
        _AS_TIERS,
    ),
    Mutant(
        "the tiers' reads push out copies that their own call needs",
        "tiers/fill/filler.py",
        "tasks += [partial(self.fill_one, layer, experts[i], slots[i]) for i in missing]",
        "tasks[:0] = [partial(self.fill_one, layer, experts[i], slots[i]) for i in missing]",
        _AS_TIERS,
    ),
    Mutant(
        "what L1 evicts in a replay is not touched in L2",
        "planner/replay/policy.py",
        "touch_evicted(pool, layer, evicted_by[slots[missing[i]]])",
        "pass",
        _AS_TIERS,
    ),
    Mutant(
        "a replay's groups do not begin with the experts that are resident",
        "planner/replay/policy.py",
        "status = how.on_slots(directory, RESIDENT_FIRST, layer, ordered)",
        "status = 0",
        _AS_TIERS,
    ),
    Mutant(
        "a replay's L2 has room for bytes, not for blocks",
        "planner/replay/calls.py",
        "blocks = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES",
        "blocks = sizes",
        _AS_TIERS,
    ),
    Mutant(
        "reads of the optimum push out copies that their own call needs",
        "planner/replay/calls.py",
        "if not touch(pool, base + int(experts[missing[i]])):",
        "if not serve(pool, base + int(experts[missing[i]])):",
        _OPTIMUM,
    ),
    Mutant(
        "what the optimum does not keep stays old in L2",
        "planner/replay/belady.py",
        "if slot_of[layer, calls.experts[i]] < 0:",
        "if False:",
        _OPTIMUM,
    ),
)
