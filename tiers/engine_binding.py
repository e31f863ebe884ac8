"""What an engine's plugin needs to know of a manager's tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertier.tiers.layer import ExpertLayer
from expertier.tiers.slot_layout import Place


@dataclass(frozen=True, slots=True)
class BoundMatrix:
    """One expert matrix of all slots of a layer.

    Slot `i`'s begins at `offset_from_slab_base + i * stride`, in bytes.
    """

    role: str
    name: str
    ggml_type: int
    ne0: int
    ne1: int
    offset_from_slab_base: int
    stride: int


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """One layer's slots; `block` is the N of the engine's `blk.N.` tensors."""

    block: int
    n_experts: int
    n_slots: int
    matrices: tuple[BoundMatrix, ...]


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """Addresses and sizes that stay valid while the engine is bound.

    The directory goes to the policy's C functions (`planner/native.py`), the locks are laid out as
    `tiers/layer_locks.py` says.
    """

    slab_base: int
    slab_bytes: int
    directory_address: int
    locks_address: int
    layers: tuple[BoundLayer, ...]


def bound_layer(layer: ExpertLayer, n_slots: int, places: Sequence[Place]) -> BoundLayer:
    """Describe a layer of `n_slots` slots whose matrices lie at `places`, counted from the slab's base."""
    matrices = tuple(
        BoundMatrix(
            role=matrix.role.value,
            name=matrix.name,
            ggml_type=matrix.ggml_type,
            ne0=matrix.ne0,
            ne1=matrix.ne1,
            offset_from_slab_base=place.offset,
            stride=place.stride,
        )
        for matrix, place in zip(layer.matrices, places, strict=True)
    )
    return BoundLayer(layer.block, layer.n_experts, n_slots, matrices)
