"""The prefill stream: large batches run on whole layers that pass through two places beside the slots (D12)."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable

N_STREAMED_LAYERS = 2
"""Places for whole layers, of which the engine computes on one while it uploads to the other."""

DEFAULT_STREAM_TOKENS = 32
"""More tokens than a decode step of parallel sequences usually has; most experts of a layer are among theirs."""


def resolve_stream_tokens(config: TierConfig, device: Device) -> int:
    """Return from how many tokens on a batch goes through the prefill stream, 0 for never.

    `auto` means only on devices with memory of their own: elsewhere the stream would be a second copy in the same
    RAM.
    """
    return _stream_tokens(config, has_own_memory=device.has_own_memory)


def prefill_stream_bytes(config: TierConfig, table: ExpertTable, *, has_own_memory: bool) -> int:
    """Return what the stream's places take of a device: each holds all experts of the table's largest layer.

    It is 0 where no batch goes through the stream.
    """
    if not _stream_tokens(config, has_own_memory=has_own_memory):
        return 0
    layers = zip(table.layers, table.slot_layouts, strict=True)
    return N_STREAMED_LAYERS * max(layout.range_bytes(layer.n_experts) for layer, layout in layers)


def _stream_tokens(config: TierConfig, *, has_own_memory: bool) -> int:
    if config.stream_tokens != "auto":
        return config.stream_tokens
    return DEFAULT_STREAM_TOKENS if has_own_memory else 0
