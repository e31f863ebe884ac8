"""Decisions without bytes: which expert leaves a slot, and how many slots a layer gets.

    demand.py, allocate.py      what a layer needs; a plan of slots under a budget
    allocate_by_profile.py      slots where a routing profile says that they save the most
    allocate_pair.py            plans for both places of the boundary, one within the other
    ledger.py, ledger_ram.py    who takes a device's memory, and the RAM; limited_by.py says what binds
    ledger_claim.py             a ledger carried out: what was really taken, undone as a whole
    geometry.py, context_memory.py   what a model takes beside its experts: cache and compute buffer
    hit_rates.py, rates.py      hits from recordings, profiles or experience; how fast a machine is
    predict.py                  tokens a second, from these
    quotas.py                   new quotas from observed demand, where they pay
    profile.py                  heat and a loading order from a profile
    policy.py, policies/        look-up, admission and eviction; who leaves first, a file a policy
    tables.py, rule.py          the arrays that they work on; what a policy's file must have
    residency.py, repack.py     those arrays with the functions as methods; who stays when slots move
    native.py                   the same functions as C function pointers for an engine's threads
    python_calls.py             the same from Python, with c_calls.py or, uncompiled, interpreted.py under it
    trace.py, trace_rows.py     recorded routing in memory; its rows joined as an engine runs them
    trace_file.py, ...          its forms as files: trace_archive.py, trace_csv.py; trace_recorder.py makes one
    profile_of_trace.py, profile_text.py   profiles from recorded routing, and from text
    routing_profile.py, profile_file.py, profile_summary.py   a profile of a model, its file, what it says
    whole_file.py               archives written whole or not at all
    replay.py                   steps through a residency, by the same functions
    replay_run.py, belady.py    whole traces with L2 under L1, policies side by side; the offline optimum

Nothing here opens a device, and only what reads and writes traces and profiles opens a file. Importing it loads no
compiler: Numba comes with the first `Residency`.
"""

from __future__ import annotations

from expertier.planner.allocate import LayerPlan, plan_layers
from expertier.planner.demand import LayerDemand
from expertier.planner.outcome import Outcome
from expertier.planner.policy_kind import PolicyKind

__all__ = ["LayerDemand", "LayerPlan", "Outcome", "PolicyKind", "plan_layers"]
