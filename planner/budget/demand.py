"""The slots that one layer has a use for, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """One layer's experts and what their slots cost: `n` slots take `fixed_bytes + n * slot_bytes`.

    `layer` counts MoE layers from 0; `top_k` is how many experts a token uses; `weight` is the layer's share of the
    routing demand, and 1 where that share is not known. Raises `ValueError` for numbers that describe no layer.
    """

    layer: int
    n_experts: int
    top_k: int
    slot_bytes: int
    fixed_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers that describe no layer."""
        if self.layer < 0 or self.slot_bytes < 1 or self.fixed_bytes < 0 or not self.weight >= 0:
            raise ValueError(f"not a layer's demand: {self}")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k must be between 1 and the layer's {self.n_experts} experts: {self}")

    def bytes_for(self, n_slots: int) -> int:
        """Return the bytes that `n_slots` slots take."""
        return self.fixed_bytes + n_slots * self.slot_bytes
