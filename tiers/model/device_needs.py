"""Gathers what a model needs of a device beside its experts, for the ledger (`planner/budget/ledger.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from expertier.planner.budget.context_memory import ContextShape, cache_bytes, compute_bytes
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.budget.ledger import Consumer, DeviceNeeds

NARROW_TOKENS = 8
"""The largest batch of decode: up to so many tokens the engine's kernels are those of matrix by vector."""


def device_needs(
    geometry: ModelGeometry,
    shape: ContextShape,
    *,
    free_bytes: int,
    headroom_bytes: int = 0,
    reserve_bytes: int = 0,
    draft_bytes: int = 0,
    prefill_stream_bytes: int = 0,
    peer_bytes: int = 0,
    taken: Mapping[Consumer, int] | None = None,
    share: float = 1.0,
) -> DeviceNeeds:
    """Return what a model and a context of this shape take of a device of which `free_bytes` are free.

    `taken` has what is allocated already, such as a key-value cache: it counts in the place of what is computed here.
    `share` is the part of weights and cache that this device holds, where several share the layers; each of them
    computes with whole buffers.
    """
    return DeviceNeeds(
        free=free_bytes,
        weights=round(geometry.device_weight_bytes * share),
        kv=round(cache_bytes(geometry, shape) * share),
        compute_narrow=compute_bytes(geometry, shape, min(NARROW_TOKENS, shape.n_ubatch)),
        compute_wide=compute_bytes(geometry, shape),
        draft=draft_bytes,
        headroom=headroom_bytes,
        prefill_stream=prefill_stream_bytes,
        peers=peer_bytes,
        reserve=reserve_bytes,
        taken=dict(taken or {}),
    )
