"""The shipped policies against small ones written anew, without tables: the same experts leave, call by call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from expertier.planner import PolicyKind
from expertier.planner.policy.residency import Residency
from expertier.testing.unlocked_calls import unlocked

N_EXPERTS = 20


class Lru:
    """Residents by slot, and the call in which each was used last."""

    def __init__(self, n_slots: int) -> None:
        self.slots: list[int | None] = [None] * n_slots
        self.last = [0] * N_EXPERTS
        self.now = 0

    def call(self, experts: list[int]) -> list[int]:
        """Use experts; returns who left, in order."""
        self.now += 1
        missing = [expert for expert in experts if expert not in self.slots]
        self.note(experts, len(missing))
        for expert in experts:
            self.last[expert] = self.now
        left = []
        for expert in missing:
            if None in self.slots:
                self.slots[self.slots.index(None)] = expert
                continue
            here = [owner for owner in self.slots if owner is not None and owner not in experts]
            left.append(min(here, key=lambda owner: (*self.worth(owner), self.slots.index(owner))))
            self.slots[self.slots.index(left[-1])] = expert
        return left

    def note(self, experts: list[int], n_missing: int) -> None:
        """Count."""

    def worth(self, expert: int) -> tuple[int, ...]:
        """Who is worth least leaves first."""
        return (self.last[expert],)


class LfuDecay(Lru):
    """Heat for every expert, halved every 20 calls, or every 5 while the misses are far above the usual."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.heat = [0] * N_EXPERTS
        self.since = self.short = self.long = self.shifted_calls = 0

    def note(self, experts: list[int], n_missing: int) -> None:
        hits = 65536 - n_missing * 65536 // len(experts)
        self.short += (hits - self.short) // 4
        self.long += (hits - self.long) // 64
        usual = 65536 - self.long
        shifted = 65536 - self.short > usual + usual // 2 + 6553
        self.shifted_calls += shifted
        self.since += 1
        if self.since >= (5 if shifted else 20):
            self.since = 0
            self.heat = [heat // 2 for heat in self.heat]
        for expert in experts:
            self.heat[expert] = min(self.heat[expert] + 16, 255)

    def worth(self, expert: int) -> tuple[int, ...]:
        return self.heat[expert], self.last[expert]


def routing(seed: int) -> list[npt.NDArray[np.int32]]:
    """2,000 calls with favourites that change every 250."""
    rng = np.random.default_rng(seed)
    calls = []
    for step in range(2000):
        if step % 250 == 0:
            odds = rng.dirichlet(np.full(N_EXPERTS, 0.25)) + 1e-3
        n = int(rng.integers(1, 5))
        calls.append(rng.choice(N_EXPERTS, n, replace=False, p=odds / odds.sum()).astype(np.int32))
    return calls


@pytest.mark.parametrize("n_slots", [4, 6, 10])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "reference"), [(PolicyKind.LRU, Lru), (PolicyKind.LFU_DECAY, LfuDecay)])
def test_the_same_experts_leave(kind: PolicyKind, reference: type[Lru], seed: int, n_slots: int) -> None:
    expected, residency = reference(n_slots), Residency([N_EXPERTS], [n_slots], kind)
    n_left = 0
    for number, experts in enumerate(routing(seed)):
        slots = np.full(len(experts), -1, np.int32)
        miss_index = np.full(len(experts), -1, np.int32)
        n_misses = unlocked(residency).begin(0, experts, slots, miss_index)
        left = residency.experts_evicted_by(0, slots[miss_index[:n_misses]])
        unlocked(residency).complete(0, slots)
        unlocked(residency).release(0, slots)
        assert left == expected.call(experts.tolist()), number
        assert residency.residents(0) == {e: i for i, e in enumerate(expected.slots) if e is not None}, number
        n_left += len(left)
    residency.check_valid()
    assert n_left > 100, "a run without evictions compares nothing"
    if isinstance(expected, LfuDecay):
        assert 0 < expected.shifted_calls < 1500, "the run should have met changes of topic, and calm"
