"""The tiers of a model that llama.cpp splits tensor by tensor: shards of every expert on each device."""

from __future__ import annotations

from dataclasses import replace

from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.llama_cpp.layer_tiers import EngineTiers
from expertier.engine_adapter.placement.blocks import DeviceChoice, candidates
from expertier.engine_adapter.placement.engine_device import device_of, has_own_memory
from expertier.engine_adapter.placement.placement import ALL_UNITS, Placement
from expertier.engine_adapter.placement.tensor_split import ask_tensor_split
from expertier.errors import ConfigError
from expertier.hip.device import Device
from expertier.planner.budget.context_memory import ContextShape
from expertier.planner.budget.ledger import DeviceNeeds
from expertier.planner.budget.sizing_split import require_a_share_each
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.shard_division import ShardDivision
from expertier.tiers.split.split_table import SplitTable
from expertier.tiers.tier_set import TierSet


def open_shard_tiers(
    engine: LoadedEngine, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> EngineTiers:
    """Make tiers for shards of the model on the engine's devices that `config.engine_device` names.

    `auto` means all GPUs of the first GPU's kind. The experts are cut by the engine's own rule, and that is checked
    before anything is allocated.

    Raises:
        UnsupportedLayoutError: a shard would be empty, or end inside of a quantised block. BudgetError: a budget is
            below what the model needs; it names the device. DeviceError: there is no such device, or it has no memory
            left. ConfigError: these devices cannot share the model. EngineError: the engine cannot split it.
    """
    for name, value in (("MOE_DECODE_GATE", config.decode_gate), ("MOE_SLAB_COMPUTE", config.slab_compute)):
        if value is True:
            raise ConfigError(
                f"{name}=1 was asked for together with MOE_SPLIT_MODE=tensor, where devices share every graph and "
                "cannot have it: set it to `auto`, or use MOE_SPLIT_MODE=layer"
            )
    proxy = engine.proxy
    names = candidates(proxy, config.engine_device)
    if len(names) < 2 or not all(has_own_memory(proxy, name) for name in names):
        raise ConfigError(
            f"MOE_SPLIT_MODE=tensor was asked for on {', '.join(names)}: it takes two GPUs or more, such as "
            "MOE_DEVICE=CUDA0,CUDA1"
        )
    shares = config.tensor_split
    if shares != "auto":
        require_a_share_each(names, shares)
    split = ask_tensor_split(engine, table, names, None if shares == "auto" else shares)
    divided = SplitTable.of(table, split.cuts(), len(names))
    devices = [device_of(proxy, name) for name in names]
    needs = [
        _needs(table, shards, device, config, shape)
        for shards, device in zip(divided.tables, devices, strict=True)
    ]
    placement = Placement(tuple(names), (ALL_UNITS,) * len(names), split)
    return EngineTiers(TierSet(ShardDivision(divided, devices, needs), config=config), placement)


def _needs(
    full: ExpertTable, shards: ExpertTable, device: Device, config: TierConfig, shape: ContextShape | None
) -> DeviceNeeds:
    """Return what the model takes of a device beside its shards of experts.

    Weights and caches are counted in proportion to the shards: the weights that the engine mirrors on every device are
    small beside them. Room for computing is counted as if the device computed the full model.
    """
    needs = DeviceChoice.of(shards, config, shape).needs_on_one_device(device)
    share = shards.expert_bytes_total / full.expert_bytes_total
    return replace(needs, weights=round(needs.weights * share), kv=round(needs.kv * share))
