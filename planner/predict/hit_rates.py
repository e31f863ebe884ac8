"""How many of a token's experts will be in their slots: from recorded routing, from a profile, or from experience.

A recording is replayed through the shipped policy itself. A profile knows how far apart the uses of each expert are,
which says what LRU hits. Where there is neither, other models' recordings say what share of the experts gives what
hit rate, and how far models differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from expertier.errors import ConfigError
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.policy.kind import PolicyKind
from expertier.planner.profiles.routing_profile import ExpertUses
from expertier.planner.traces.trace import Phase, Trace

F64 = npt.NDArray[np.float64]

_SHARES = (0.0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
_LOW = (0.0, 0.22, 0.46, 0.61, 0.71, 0.84, 0.915, 0.98, 1.0)
_MIDDLE = (0.0, 0.40, 0.60, 0.71, 0.79, 0.88, 0.935, 0.985, 1.0)
_HIGH = (0.0, 0.49, 0.65, 0.76, 0.83, 0.92, 0.96, 0.995, 1.0)
"""Hit rates of decode by the share of a layer's experts that have a slot: the range and the middle of four recordings,
of Qwen3-30B-A3B, Gemma-4-26B-A4B, gpt-oss-120b and gpt-oss-20b (`benchmarks/policy/hit_curve.py`,
docs/measurements.md)."""

_LRU_IS_BELOW = 1.25
"""LRU misses at least as much as the shipped policy, and at most so many times as much."""

_OTHER_TOPIC = 0.05
"""The share by which a run may miss more or less than the recording that predicts it."""


@dataclass(frozen=True, slots=True)
class Misses:
    """How many of a token's experts, over all layers, are in no slot: the expected number, and its range.

    `bytes` are the expected bytes of these experts; `pool_share` is the share of them that a copy in L2 serves.
    """

    low: float
    expected: float
    high: float
    lookups: float
    bytes: float
    pool_share: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The expected share of look-ups that hit."""
        return 1 - self.expected / self.lookups


class HitRates(Protocol):
    """Where hit rates come from."""

    @property
    def source(self) -> str:
        """What the hit rates are computed from, in words for a person."""
        ...

    def misses(self, slots: Sequence[int], pool_bytes: int = 0) -> Misses:
        """Return the misses of a token of decode with so many slots in each layer, over a pool of so many bytes."""
        ...


class FromExperience:
    """Hit rates that other models had at the same share of experts in slots."""

    def __init__(self, demands: Sequence[LayerDemand]) -> None:
        """Predict for a model of these layers."""
        self._demands = demands

    @property
    def source(self) -> str:
        """What the hit rates are computed from."""
        return "an estimate from recordings of other models (give --trace or --profile for this one's own)"

    def misses(self, slots: Sequence[int], pool_bytes: int = 0) -> Misses:
        """Return the misses of a token; L2 serves those that would have hit if L1 held as many experts as L2 does."""
        low = expected = high = n_bytes = from_pool = 0.0
        held = sum(n * demand.slot_bytes for n, demand in zip(slots, self._demands, strict=True))
        everything = sum(demand.n_experts * demand.slot_bytes for demand in self._demands)
        for n, demand in zip(slots, self._demands, strict=True):
            share = n / demand.n_experts
            missed = demand.top_k * (1 - _hits(share, _MIDDLE))
            low += demand.top_k * (1 - _hits(share, _HIGH))
            high += demand.top_k * (1 - _hits(share, _LOW))
            expected += missed
            n_bytes += missed * demand.slot_bytes
            both = min(max(share, pool_bytes / everything), 1.0)  # the pool holds the experts of L1, and more
            if pool_bytes > held:
                from_pool += demand.top_k * (_hits(both, _MIDDLE) - _hits(share, _MIDDLE))
        lookups = float(sum(demand.top_k for demand in self._demands))
        return Misses(low, expected, high, lookups, n_bytes, from_pool / expected if expected else 0.0)


class FromProfile:
    """Hit rates of LRU, from the reuse distances of a profile; the shipped policy does a little better."""

    def __init__(self, demands: Sequence[LayerDemand], uses: ExpertUses) -> None:
        """Predict for a model of these layers. Raises ConfigError for a profile of another model."""
        shape = [demand.n_experts for demand in demands]
        if uses.n_experts.tolist() != shape:
            raise ConfigError(
                f"the profile is of {uses.n_layers} layers of {max(uses.n_experts.tolist())} experts, the model has "
                f"{len(demands)} of {max(shape)}: make it from a recording of this model"
            )
        self._demands = demands
        distances = uses.reuse_distances.astype(np.float64)
        total = np.maximum(distances.sum(axis=1, keepdims=True), 1.0)
        hits = np.cumsum(distances, axis=1) / total
        self._hits: F64 = np.concatenate((np.zeros((len(demands), 1)), hits[:, :-1]), axis=1)

    @property
    def source(self) -> str:
        """What the hit rates are computed from."""
        return "the profile's reuse distances"

    def misses(self, slots: Sequence[int], pool_bytes: int = 0) -> Misses:
        """Return the misses of a token."""
        per_layer = self._missed(slots)
        sizes = np.array([demand.slot_bytes for demand in self._demands])
        lookups = float(sum(demand.top_k for demand in self._demands))
        found, pool_share = float(per_layer.sum()), 0.0
        held = float((sizes * np.array(slots)).sum())
        if pool_bytes > held and found:
            factor = pool_bytes / held
            wider = [min(int(n * factor), d.n_experts) for n, d in zip(slots, self._demands, strict=True)]
            pool_share = 1 - float(self._missed(wider).sum()) / found
        expected = found * (1 + 1 / _LRU_IS_BELOW) / 2
        n_bytes = float((per_layer * sizes).sum()) * expected / found if found else 0.0
        return Misses(found / _LRU_IS_BELOW, expected, found, lookups, n_bytes, pool_share)

    def _missed(self, slots: Sequence[int]) -> F64:
        rows = np.arange(len(self._demands))
        top_k = np.array([demand.top_k for demand in self._demands])
        missed: F64 = top_k * (1 - self._hits[rows, np.minimum(slots, self._hits.shape[1] - 1)])
        return missed


class FromTrace:
    """Hit rates of the shipped policy in a replay of a recording."""

    def __init__(
        self,
        demands: Sequence[LayerDemand],
        trace: Trace,
        policy: str = PolicyKind.LFU_DECAY.value,
        *,
        from_cold: bool = False,
    ) -> None:
        """Predict for a model of these layers; `policy` is one of `POLICIES` in `replay/run.py`.

        The first half of the recording fills the slots, and the second half is counted. With `from_cold` all of the
        recording is counted, from empty slots.
        Raises ConfigError for a recording of another model, or without decode.
        """
        known = trace.n_experts.tolist()
        shape = [demand.n_experts for demand in demands]
        if len(known) != len(shape) or any(a > b for a, b in zip(known, shape, strict=True)):
            raise ConfigError(
                f"the recording is of {len(known)} layers of {max(known)} experts, the model has {len(shape)} of "
                f"{max(shape)}: record this model (`expertier run --record-routing FILE`)"
            )
        self._sizes = np.array([demand.slot_bytes for demand in demands], np.int64)
        self._trace = _sized(trace.of_phase(Phase.DECODE), shape, self._sizes)
        if self._trace.n_calls == 0:
            raise ConfigError(
                "the recording has no decode to predict from: record a run that generates tokens"
            )
        self._policy = policy
        self._lookups = float(sum(demand.top_k for demand in demands))
        single = self._trace.lengths[self._trace.rows == 1]
        own = int(np.median([demand.top_k for demand in demands]))
        usual = int(np.median(single)) if len(single) else own
        self._top_k = None if usual == own else usual
        half = 0 if from_cold else self._trace.n_calls // 2 // len(shape) * len(shape)
        self._warm_up = self._trace.section(0, half) if half else None
        self.misses_of = lru_cache(maxsize=256)(self._replay)

    @property
    def source(self) -> str:
        """What the hit rates are computed from."""
        recorded = f", scaled from top-{self._top_k}" if self._top_k is not None else ""
        return f"the recording, replayed through {self._policy}{recorded}"

    def misses(self, slots: Sequence[int], pool_bytes: int = 0) -> Misses:
        """Return the misses of a token."""
        found: Misses = self.misses_of(tuple(slots), pool_bytes)
        return found

    def _replay(self, slots: tuple[int, ...], pool_bytes: int) -> Misses:
        from expertier.planner.replay import run  # loads the compiler

        l1 = run.L1(slots, int((np.array(slots, np.int64) * self._sizes).sum()))
        counts = np.zeros(4)
        for section, sign in ((self._trace, 1), (self._warm_up, -1)):
            if section is not None:
                found = run.replay(section, l1, self._policy, pool_bytes=pool_bytes)
                of_section = (found.misses, found.lookups, found.bytes_in or 0, found.pool_hits)
                counts += sign * np.array(of_section, np.float64)
        misses, lookups, n_bytes, pool_hits = counts.tolist()
        a_token = self._lookups / lookups  # by look-ups, not by rows: the recording may have another top-k
        missed = misses * a_token
        return Misses(
            low=missed * (1 - _OTHER_TOPIC),
            expected=missed,
            high=missed * (1 + _OTHER_TOPIC),
            lookups=self._lookups,
            bytes=n_bytes * a_token,
            pool_share=pool_hits / misses if misses else 0.0,
        )


def _sized(trace: Trace, n_experts: Sequence[int], sizes: npt.NDArray[np.int64]) -> Trace:
    """Return the trace with the model's numbers and sizes of experts."""
    return replace(trace, n_experts=np.array(n_experts, np.int32), expert_bytes=sizes)


def _hits(share: float, rates: Sequence[float]) -> float:
    return float(np.interp(share, _SHARES, rates))
