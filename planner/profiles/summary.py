"""What a routing profile says, in numbers for a person: how uneven layers are, and what an LRU of n slots would hit."""

from __future__ import annotations

from typing import Any

import numpy as np

from expertier.planner.profiles.routing_profile import ExpertUses, RoutingProfile

SHARES = (0.5, 0.8, 0.95)
"""Shares of a layer's uses; the summary says how many of its most used experts have such a share."""

FRACTIONS = (0.125, 0.25, 0.5, 0.75)
"""Numbers of slots, as fractions of a layer's experts."""


def summarize(profile: RoutingProfile) -> dict[str, Any]:
    """Return what `expertier profile show --json` prints."""
    if profile.layer_weights is not None:
        return {
            "profile": profile.name,
            "kind": "layers",
            "layers": len(profile.layer_weights),
            "per_layer": [
                {"block": block, "weight": weight} for block, weight in profile.layer_weights.items()
            ],
        }
    assert profile.experts is not None
    known = profile.experts
    return {
        "profile": profile.name,
        "kind": "experts",
        "layers": known.n_layers,
        "calls": known.calls,
        "uses": int(known.uses.sum()),
        "lru_hit_rates": {f"{fraction:g}": _lru_hit_rate(known, fraction) for fraction in FRACTIONS},
        "held_hit_rates": {f"{fraction:g}": _held_hit_rate(known, fraction) for fraction in FRACTIONS},
        "per_layer": [_layer(known, layer) for layer in range(known.n_layers)],
    }


def _layer(known: ExpertUses, layer: int) -> dict[str, Any]:
    n_experts = int(known.n_experts[layer])
    uses = np.sort(known.uses[layer, :n_experts])[::-1]
    total = int(uses.sum())
    reached = np.cumsum(uses) / max(total, 1)
    return {
        "block": int(known.blocks[layer]),
        "experts": n_experts,
        "uses": total,
        "unused": int((uses == 0).sum()),
        "hottest": int(known.uses[layer].argmax()) if total else None,
        "hottest_share": int(uses[0]) / total if total else None,
        "experts_for": {
            f"{share:g}": int(np.searchsorted(reached, share) + 1) if total else None for share in SHARES
        },
        "median_reuse_distance": _median_distance(known, layer),
    }


def _median_distance(known: ExpertUses, layer: int) -> int | None:
    """Return the median number of other experts between two uses of one; None where no expert was used twice."""
    found = known.reuse_distances[layer, :-1]
    total = int(found.sum())
    return int(np.searchsorted(np.cumsum(found), (total + 1) // 2)) if total else None


def _slots(known: ExpertUses, fraction: float) -> list[int]:
    return [max(int(n * fraction), 1) for n in known.n_experts.tolist()]


def _lru_hit_rate(known: ExpertUses, fraction: float) -> float | None:
    """Return what LRU with so many slots a layer would have hit, expert by expert as recorded, from cold."""
    lookups = int(known.reuse_distances.sum())
    hits = sum(
        int(row[:n].sum()) for row, n in zip(known.reuse_distances, _slots(known, fraction), strict=True)
    )
    return hits / lookups if lookups else None


def _held_hit_rate(known: ExpertUses, fraction: float) -> float | None:
    """Return what the most used experts of each layer would have hit, had they been held all the time."""
    total = int(known.uses.sum())
    hits = sum(
        int(np.sort(row)[::-1][:n].sum()) for row, n in zip(known.uses, _slots(known, fraction), strict=True)
    )
    return hits / total if total else None
