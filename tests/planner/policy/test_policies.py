"""What every policy must keep: each file in `policies/` runs through these tests, a file that a user adds included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.planner import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.planner.policy.tables import RANK_SPECULATIVE, SLOT_BITS
from expertier.testing.unlocked_calls import unlocked
from policy_runs.played_steps import play
from servers.package_copies import run_with_file

KINDS = list(PolicyKind)


def test_the_policies_that_our_code_names_are_there() -> None:
    assert {PolicyKind.LFU_DECAY, PolicyKind.LRU} <= set(KINDS)
    assert [PolicyKind(kind.value) for kind in KINDS] == KINDS


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True), min_size=1, max_size=60),
    st.integers(4, 6),
)
def test_ranks_keep_their_bounds_and_what_was_used_is_not_lost(
    kind: PolicyKind, calls: list[list[int]], n_slots: int
) -> None:
    residency = Residency([9], [n_slots], kind)
    for experts in calls:
        slots = np.full(len(experts), -1, np.int32)
        asked = np.array(experts, np.int32)
        assert unlocked(residency).begin(0, asked, slots, slots.copy()) >= 0
        unlocked(residency).complete(0, slots)
        unlocked(residency).release(0, slots)
        residency.check_valid()
        assert set(experts) <= set(residency.residents(0)), "a call's own experts are its last victims"
        ranks = residency.order[residency.owner >= 0] >> SLOT_BITS
        assert ((ranks > RANK_SPECULATIVE) & (ranks < 1 << 46)).all()
    assert len(residency.residents(0)) == min(n_slots, len({e for experts in calls for e in experts}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_years_of_calls_do_not_overflow(kind: PolicyKind) -> None:
    residency = Residency([9], [4], kind)
    residency.counters[0, 0] = (1 << 38) - 100
    rng = np.random.default_rng(0)
    play(residency, np.array([[rng.permutation(9)[:3]] for _ in range(90)], np.int32))
    residency.check_valid()
    assert (residency.order >= 0).all()


NEWEST_FIRST = '''
"""MRU: what was used last leaves first."""

from __future__ import annotations

from expertier.planner.policy.policy import begin_for
from expertier.planner.policy.tables import I32, I64, LayerView, compiled


def n_notes(_n_experts: int) -> int:
    return 0


@compiled
def step(_view: LayerView, _experts: I32, _n: int, _n_missing: int, _now: int) -> None:
    pass


@compiled
def use(_view: LayerView, _expert: int, now: int) -> int:
    return (1 << 40) - now


def reheated(ranks: I64, _heat: I64) -> I64:
    return ranks


begin = begin_for(__name__)
'''

TRY_IT = """
import numpy as np
from expertier.planner.replay.run import l1_of_slots, replay
from expertier.planner.traces.trace import trace_from_ids
trace = trace_from_ids(np.array([[[e]] for e in (0, 1, 2, 3, 0, 1)]), n_experts=8)
print([replay(trace, l1_of_slots(trace, 3), policy).misses for policy in ("newest-first", "lru")])
"""


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["interpreted", "compiled"]
)
def test_a_policy_is_one_file(tmp_path: Path, *, compiled: bool) -> None:
    """A copy of the package with one more file: the policy is found by its name and plays a recording."""
    file = "planner/policy/policies/newest_first.py"
    result = run_with_file(tmp_path, file, NEWEST_FIRST, TRY_IT, compiled=compiled)
    assert result.stdout.strip() == "[4, 6]", result.stderr
