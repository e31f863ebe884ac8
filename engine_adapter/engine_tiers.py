"""The tiers of a model on one of the engine's own devices, with room left for what else the engine puts there."""

from __future__ import annotations

import ctypes as ct
from typing import NamedTuple

from expertier.engine_adapter.engine_device import choose_device, device_of
from expertier.engine_adapter.slab_compute import computes_in_slab
from expertier.planner.context_memory import ContextShape
from expertier.tiers.config import TierConfig
from expertier.tiers.device_needs import device_needs
from expertier.tiers.manager import TierManager
from expertier.tiers.model_geometry import read_geometry
from expertier.tiers.staged_batches import resolve_stream_tokens
from expertier.tiers.table import ExpertTable

N_STAGED_LAYERS = 2
"""Layers that large batches pass through at the same time (ggml_proxy/staging.h)."""


class EngineTiers(NamedTuple):
    """Tiers, and ggml's name of the device that they are on."""

    manager: TierManager
    device_name: str


def open_engine_tiers(
    proxy: ct.CDLL, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> EngineTiers:
    """Make tiers on the engine's device that `config.engine_device` names, for contexts of `shape` altogether.

    Raises:
        BudgetError: a budget is below what the model needs. DeviceError: there is no such device, or it has no
            memory left.
    """
    name = choose_device(proxy, config.engine_device)
    device = device_of(proxy, name)
    if not device.has_own_memory:
        return EngineTiers(TierManager(table, device=device, config=config), name)
    layers = zip(table.layers, table.slot_layouts, strict=True)
    largest = max(layout.range_bytes(layer.n_experts) for layer, layout in layers)
    needs = device_needs(
        read_geometry(table.path),
        shape if shape is not None else ContextShape(full_windows=True),  # as llama.cpp by default
        free_bytes=device.free_bytes(),
        staging_bytes=N_STAGED_LAYERS * largest if resolve_stream_tokens(config, device) else 0,
    )
    manager = TierManager(
        table,
        device=device,
        config=config,
        needs=needs,
        compute_bytes=needs.compute_wide if computes_in_slab(proxy, config.slab_compute, name) else 0,
    )
    return EngineTiers(manager, name)
