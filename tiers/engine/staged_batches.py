"""From which batch on an engine stages whole layers instead of filling slots (D12)."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable

N_STAGED_LAYERS = 2
"""Layers that large batches pass through at the same time (ggml_proxy/graph/staging.h)."""

DEFAULT_STREAM_TOKENS = 32
"""More tokens than a decode step of parallel sequences usually has; most experts of a layer are among theirs."""


def resolve_stream_tokens(config: TierConfig, device: Device) -> int:
    """Return the number of tokens from which a batch is staged, 0 for never.

    `auto` stages on devices with memory of their own only: elsewhere a staged layer is a second copy in the same
    RAM.
    """
    return _stream_tokens(config, has_own_memory=device.has_own_memory)


def staging_bytes(config: TierConfig, table: ExpertTable, *, has_own_memory: bool) -> int:
    """Return what staged layers take of a device: the largest of the table's with all its experts, twice.

    0 where no batch is staged.
    """
    if not _stream_tokens(config, has_own_memory=has_own_memory):
        return 0
    layers = zip(table.layers, table.slot_layouts, strict=True)
    return N_STAGED_LAYERS * max(layout.range_bytes(layer.n_experts) for layer, layout in layers)


def _stream_tokens(config: TierConfig, *, has_own_memory: bool) -> int:
    if config.stream_tokens != "auto":
        return config.stream_tokens
    return DEFAULT_STREAM_TOKENS if has_own_memory else 0
