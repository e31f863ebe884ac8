"""The prefill stream: for large batches, whole layers pass through two places in memory beside the slots (D12)."""

from __future__ import annotations

from expertier.hip.device import Device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable

N_STREAMED_LAYERS = 2
"""Places for whole layers: the engine computes with the layer in one place while it uploads the next to the other."""

DEFAULT_STREAM_TOKENS = 32
"""A number of tokens above that of usual decode steps, parallel sequences included.

A batch of so many tokens uses most experts of a layer, so that uploading all of them wastes little.
"""


def resolve_stream_tokens(config: TierConfig, device: Device) -> int:
    """Return the number of tokens from which on a batch goes through the prefill stream; 0: no batch does.

    `auto` switches the stream on for devices with memory of their own only: on other devices a streamed layer would be
    a second copy in the same RAM.
    """
    return _stream_tokens(config, has_own_memory=device.has_own_memory)


def prefill_stream_bytes(config: TierConfig, table: ExpertTable, *, has_own_memory: bool) -> int:
    """Return the bytes of device memory that the stream's places take; 0 where no batch goes through the stream.

    Each place holds all experts of the table's largest layer.
    """
    if not _stream_tokens(config, has_own_memory=has_own_memory):
        return 0
    layers = zip(table.layers, table.slot_layouts, strict=True)
    return N_STREAMED_LAYERS * max(layout.range_bytes(layer.n_experts) for layer, layout in layers)


def _stream_tokens(config: TierConfig, *, has_own_memory: bool) -> int:
    if config.stream_tokens != "auto":
        return config.stream_tokens
    return DEFAULT_STREAM_TOKENS if has_own_memory else 0
