"""Computes what a model takes of a device beside its experts, for the ledger (`planner/budget/ledger.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from expertier.planner.budget.context_memory import ContextShape, cache_bytes, compute_bytes
from expertier.planner.budget.geometry import ModelGeometry
from expertier.planner.budget.ledger import Consumer, DeviceNeeds

NARROW_TOKENS = 8
"""The largest batch of decode, in tokens: up to this size the engine's kernels multiply a matrix by a vector."""


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
    """Return what a model and a context of `shape` take of a device that has `free_bytes` of free memory.

    `taken` has the bytes of consumers that are allocated already, such as a key-value cache; they replace the numbers
    computed here. `share` is the fraction of weights and cache that this device holds, where several devices share the
    layers. Compute buffers are not divided: each device needs all of theirs.
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
