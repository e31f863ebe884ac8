"""Tokens a second, predicted: what a layer and its weights cost, and what bringing in missed experts costs.

    seconds a token = a token's own cost + layers x cost of one + bytes of weights read / their rate
                      + layers without a slot for every expert x cost of a look-up
                      + missed experts from L2, the page cache and the disk, each by its own path

The prediction assumes that nothing overlaps; fills that run during computation make decode faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertier.planner.budget.context_memory import ContextShape, cache_bytes
from expertier.planner.budget.demand import LayerDemand
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.predict.hit_rates import HitRates, Misses
from expertier.planner.predict.rates import MachineRates, PathRate


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second: the prediction, and its range."""

    low: float
    predicted: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return {"low": self.low, "predicted": self.predicted, "high": self.high}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected speeds of a plan. The seconds are those of one decoded token, by what takes them."""

    decode: Speed
    prefill: Speed
    hit_rate: float
    missed_bytes: float
    compute_s: float
    pool_s: float
    page_cache_s: float
    disk_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, for `--json`."""
        return {
            "decode_tokens_per_s": self.decode.as_dict(),
            "prefill_tokens_per_s": self.prefill.as_dict(),
            "hit_rate": self.hit_rate,
            "missed_bytes_per_token": self.missed_bytes,
            "seconds_per_token": {
                "compute": self.compute_s,
                "from_pool": self.pool_s,
                "from_page_cache": self.page_cache_s,
                "from_disk": self.disk_s,
            },
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs: a model with its slots, a context filled with `depth` tokens, and where missed experts lie.

    `pool_bytes` is the size of L2; `cached_share` is the part of the file's experts that the page cache holds.
    """

    geometry: ModelGeometry
    demands: Sequence[LayerDemand]
    slots: Sequence[int]
    shape: ContextShape
    pool_bytes: int = 0
    cached_share: float = 1.0
    depth: int = 1024

    @property
    def layers(self) -> int:
        """Blocks of the model, with experts or without."""
        return max(len(self.geometry.blocks), len(self.demands))

    @property
    def looked_up(self) -> int:
        """Layers with experts of which some have no slot."""
        return sum(n < demand.n_experts for n, demand in zip(self.slots, self.demands, strict=True))

    @property
    def token_bytes(self) -> float:
        """Bytes of weights and cache that a decoded token reads."""
        experts = sum(demand.top_k * demand.slot_bytes for demand in self.demands)
        filled = min(self.depth, self.shape.n_ctx) / max(self.shape.cells, 1)
        return self.geometry.device_weight_bytes + experts + filled * cache_bytes(self.geometry, self.shape)


def predict(work: Workload, hits: HitRates, rates: MachineRates) -> Prediction:
    """Return the speeds that a plan is expected to reach on a machine of these rates."""
    misses = hits.misses(work.slots, work.pool_bytes)
    compute = rates.token_s + rates.decode.seconds(work.layers, work.token_bytes)
    compute += rates.lookup_s * work.looked_up
    shares = {
        "pool": misses.pool_share,
        "page_cache": (1 - misses.pool_share) * work.cached_share,
        "disk": (1 - misses.pool_share) * (1 - work.cached_share),
    }
    paths = {"pool": rates.pool, "page_cache": rates.page_cache, "disk": rates.disk}
    seconds = {
        name: path.seconds(misses.expected * shares[name], misses.bytes * shares[name])
        for name, path in paths.items()
    }
    ranges = [_range(compute, rates.decode)]
    for name, path in paths.items():
        few, many = _ends(misses)
        low, high = _range(seconds[name], path)
        ranges.append((low * few, high * many))
    total = compute + sum(seconds.values())
    return Prediction(
        decode=Speed(1 / sum(high for _, high in ranges), 1 / total, 1 / sum(low for low, _ in ranges)),
        prefill=_prefill(work, rates),
        hit_rate=misses.hit_rate,
        missed_bytes=misses.bytes,
        compute_s=compute,
        pool_s=seconds["pool"],
        page_cache_s=seconds["page_cache"],
        disk_s=seconds["disk"],
    )


def _prefill(work: Workload, rates: MachineRates) -> Speed:
    """Predict a prompt in batches of `n_ubatch`: each expert that a batch uses and no slot holds is copied once."""
    tokens = min(work.shape.n_ubatch, work.shape.n_ctx)
    weights = work.token_bytes * tokens
    missed = n_bytes = 0.0
    for demand, n in zip(work.demands, work.slots, strict=True):
        used = demand.n_experts * (1 - (1 - demand.top_k / demand.n_experts) ** tokens)
        absent = used * (1 - n / demand.n_experts)
        missed += absent
        n_bytes += absent * demand.slot_bytes
    everything = sum(demand.n_experts * demand.slot_bytes for demand in work.demands)
    pool = min(work.pool_bytes / everything, 1.0)
    compute = rates.prefill.seconds(work.layers, weights)
    low, high = _range(compute, rates.prefill)
    total = compute
    for share, path in (
        (pool, rates.pool),
        ((1 - pool) * work.cached_share, rates.page_cache),
        ((1 - pool) * (1 - work.cached_share), rates.disk),
    ):
        seconds = path.seconds(missed * share, n_bytes * share)
        total += seconds
        fast, slow = _range(seconds, path)
        low, high = low + fast, high + slow
    return Speed(tokens / high, tokens / total, tokens / low)


def _range(seconds: float, path: PathRate) -> tuple[float, float]:
    return seconds * (1 - path.spread), seconds * (1 + path.spread)


def _ends(misses: Misses) -> tuple[float, float]:
    if not misses.expected:
        return 1.0, 1.0
    return misses.low / misses.expected, misses.high / misses.expected
