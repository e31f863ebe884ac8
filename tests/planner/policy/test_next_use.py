"""The policy that learns each expert's next use: as written anew without tables of addresses, and what it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import PolicyKind
from expertier.planner.policy.policies import next_use
from expertier.planner.policy.residency import Residency
from expertier.planner.replay.run import BELADY, compare, l1_of_slots
from expertier.planner.traces.trace import trace_from_ids
from expertier.testing.unlocked_calls import unlocked
from policy_runs.played_steps import play

KIND = PolicyKind("next-use")
I64 = npt.NDArray[np.int64]
TRACE = Path(__file__).parents[3].parent / "shared" / "traces" / "gptoss20b" / "gptoss20b_ids_only.npz"


class Reference:
    """One layer, with a dictionary for each table and every expert's numbers in 64 bits."""

    def __init__(self, n_experts: int, n_slots: int) -> None:
        self.slots: list[int | None] = [None] * n_slots
        self.n = n_experts
        self.now = 0
        self.heat, self.recent, self.last = (np.zeros(n_experts, np.int64) for _ in range(3))
        self.since = 0
        self.weights = {"heat": 2048, "recent": 2048}
        self.tables: dict[tuple[str, int], I64] = {}
        self.calls: dict[int, tuple[list[int], I64, dict[str, I64]]] = {}
        self.errors: dict[int, I64] = {}

    def row(self, table: str, number: int) -> I64:
        return self.tables.setdefault((table, number), np.zeros(self.n, np.int64))

    def pair(self, one: int, other: int) -> int:
        rows = 1024 if self.n <= 256 else 512
        low, high = sorted((one, other))
        return ((low * 1024 + high) * 2654435761 % 2**32 // 128) % rows

    def call(self, experts: list[int]) -> list[int]:
        """Use experts; returns who left, in order."""
        self.now += 1
        self.since += 1
        if self.since == 20:
            self.heat, self.since = self.heat // 2, 0
        self.recent = self.recent - self.recent // 8
        share = max(16384 - 16384 * len(experts) // (2 * len(self.slots)), 8192)
        for expert in experts:
            near = 16384
            for then in range(self.now - 1, max(self.now - 8, 1, int(self.last[expert])) - 1, -1):
                self.errors[then][expert] = min(self.errors[then][expert] + near, 32767)
                near = near * share // 16384
            self.last[expert] = self.now
            self.recent[expert] += 1 << 17
        self.learn(self.now - 8, len(self.slots) > 4 * len(experts))
        said = self.say(experts)
        missing = [expert for expert in experts if expert not in self.slots]
        for expert in experts:
            self.heat[expert] = min(self.heat[expert] + 16, 255)
        left = []
        for expert in missing:
            if None in self.slots:
                self.slots[self.slots.index(None)] = expert
                continue
            here = [owner for owner in self.slots if owner is not None and owner not in experts]
            left.append(min(here, key=lambda owner: (said[owner], self.last[owner], self.slots.index(owner))))
            self.slots[self.slots.index(left[-1])] = expert
        return left

    def say(self, experts: list[int]) -> I64:
        said = self.weights["recent"] * (self.recent // 64) // 4096
        said = said + self.weights["heat"] * (self.heat * 64) // 4096
        for before in self.calls.get(self.now - 1, ([],))[0]:
            said = said + self.row("lags", before)
        kept = experts if len(experts) <= 64 else []
        for expert in kept:
            said = said + self.row("follows", expert)
        if len(experts) <= 16:
            for i, expert in enumerate(experts):
                for other in experts[:i]:
                    said = said + self.row("pairs", self.pair(expert, other))
        said = np.clip(said, -32767, 32767)
        self.errors[self.now] = -said
        seen = {"heat": self.heat * 128, "recent": np.minimum(self.recent // 32, 32767)}
        self.calls[self.now] = (list(kept), said, seen)
        return said

    def learn(self, then: int, many_slots: bool) -> None:
        if then < 1 or not self.calls[then][0]:
            return
        experts, _, seen = self.calls[then]
        error, bits = self.errors[then], 9 + many_slots
        for expert in experts:
            self.row("follows", expert)[:] += (error + 2 ** (bits - 1)) // 2**bits
        if len(experts) <= 16:
            for i, expert in enumerate(experts):
                for other in experts[:i]:
                    row = self.row("pairs", self.pair(expert, other))
                    row += (error + 2 ** (bits - 2)) // 2 ** (bits - 1)
        for expert in experts:
            self.row("lags", expert)[:] += (self.errors[then + 1] + 2 ** (bits - 1)) // 2**bits
        if then % 4 == 0:
            for name, numbers in seen.items():
                slope = int((error * numbers).sum()) // len(experts)
                self.weights[name] = min(max(self.weights[name] + (slope >> 24), -65536), 65536)


def routing(seed: int, n_experts: int, most: int) -> list[npt.NDArray[np.int32]]:
    """1,200 calls of 1 to `most` experts, with favourites that change and some that come after others."""
    rng = np.random.default_rng(seed)
    calls = []
    for step in range(1200):
        if step % 300 == 0:
            odds = rng.dirichlet(np.full(n_experts, 0.2)) + 1e-3
        n = int(rng.integers(1, most + 1))
        asked = rng.choice(n_experts, n, replace=False, p=odds / odds.sum())
        if calls and rng.random() < 0.5:
            asked[0] = (calls[-1][0] * 7 + 1) % n_experts
            asked = np.unique(asked)
        calls.append(asked.astype(np.int32))
    return calls


@pytest.mark.parametrize(("n_experts", "n_slots", "most"), [(20, 6, 4), (33, 12, 2), (100, 80, 75)])
@pytest.mark.parametrize("seed", range(2))
def test_the_same_experts_leave(seed: int, n_experts: int, n_slots: int, most: int) -> None:
    expected, residency = Reference(n_experts, n_slots), Residency([n_experts], [n_slots], KIND)
    n_left = 0
    for number, experts in enumerate(routing(seed, n_experts, most)):
        slots = np.full(len(experts), -1, np.int32)
        miss_index = np.full(len(experts), -1, np.int32)
        n_misses = unlocked(residency).begin(0, experts, slots, miss_index)
        assert n_misses >= 0
        left = residency.experts_evicted_by(0, slots[miss_index[:n_misses]])
        unlocked(residency).complete(0, slots)
        unlocked(residency).release(0, slots)
        assert left == expected.call(experts.tolist()), number
        n_left += len(left)
    residency.check_valid()
    assert n_left > 100, "a run without evictions compares nothing"
    assert len({name for name, _ in expected.tables}) == 3
    assert expected.weights != {"heat": 2048, "recent": 2048}
    assert max(np.abs(row).max() for row in expected.tables.values()) < 32768


def hit_rate(kind: PolicyKind, steps: npt.NDArray[np.int32], n_slots: int) -> float:
    """Return the hit rate of the last half."""
    residency = Residency([int(steps.max()) + 1], [n_slots], kind)
    half = len(steps) // 2
    play(residency, steps[:half, np.newaxis])
    before = residency.totals()
    play(residency, steps[half:, np.newaxis])
    after = residency.totals()
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return hits / (hits + misses)


def test_it_learns_a_circle_in_which_heat_and_recency_never_hit() -> None:
    circle = (np.arange(6000) % 8).astype(np.int32)[:, np.newaxis]
    assert hit_rate(PolicyKind.LRU, circle, 6) == 0
    assert hit_rate(PolicyKind.LFU_DECAY, circle, 6) < 0.5
    assert hit_rate(KIND, circle, 6) > 0.6  # the optimum hits 5 of 7


def test_it_learns_what_two_experts_together_mean() -> None:
    """After 0 and 1, or 2 and 3, come 4 and 6; after 0 and 3, or 2 and 1, 5 and 7: no single expert tells."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(8000):
        one, other = rng.integers(2, size=2).tolist()
        steps += [[2 * one, 1 + 2 * other], [4 + (one + other) % 2, 6 + (one + other) % 2]]
    asked = np.array(steps, np.int32)
    assert hit_rate(KIND, asked, 6) > hit_rate(PolicyKind.LFU_DECAY, asked, 6) + 0.06


def test_what_it_keeps_is_small() -> None:
    assert 4 * next_use.n_notes(32) < 80 * 1024
    assert 4 * next_use.n_notes(128) < 360 * 1024
    assert 100 * 4 * next_use.n_notes(512) < 160 << 20


def test_a_prompt_is_not_learnt_from_and_does_not_stop_it() -> None:
    residency = Residency([128], [100], KIND)
    rng = np.random.default_rng(0)
    for n in (8, 90, 8, 16, 17, 64, 65, 8) * 20:
        experts = np.sort(rng.permutation(128)[:n]).astype(np.int32)
        slots = np.full(n, -1, np.int32)
        assert unlocked(residency).begin(0, experts, slots, slots.copy()) >= 0
        unlocked(residency).complete(0, slots)
        unlocked(residency).release(0, slots)
    residency.check_valid()


def test_it_closes_half_of_the_gap_on_sequences_that_were_not_used_to_tune_it() -> None:
    if not TRACE.exists():
        pytest.skip(f"recorded routing is not there: {TRACE}")
    with np.load(TRACE) as recorded:
        ids, offsets = recorded["ids"], recorded["offsets"]
    held_out = np.random.default_rng(1).permutation(560)[200:240]
    trace = trace_from_ids(np.concatenate([ids[offsets[i] : offsets[i + 1]] for i in held_out]), n_experts=32)
    for n_slots, share in ((8, 0.48), (16, 0.43)):
        (_, learned), (_, lfu), (_, optimum) = compare(
            trace, l1_of_slots(trace, n_slots), [KIND.value, PolicyKind.LFU_DECAY, BELADY]
        )
        assert optimum == 1
        assert learned is not None
        assert lfu is not None
        assert learned > share > lfu + 0.08
