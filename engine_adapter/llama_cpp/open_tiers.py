"""The tiers of a model on an engine's devices, however the engine divides the model over them."""

from __future__ import annotations

from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.llama_cpp.engine_tiers import EngineTiers, open_engine_tiers
from expertier.engine_adapter.llama_cpp.shard_tiers import open_shard_tiers
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable


def open_tiers(
    engine: LoadedEngine, table: ExpertTable, config: TierConfig, shape: ContextShape | None = None
) -> EngineTiers:
    """Make tiers on the devices that `config.engine_device` names, by layers or by shards (`config.split_mode`).

    `shape` describes the contexts that these devices need room for. Raises what `open_engine_tiers` and
    `open_shard_tiers` do.
    """
    if config.split_mode is SplitMode.TENSOR:
        return open_shard_tiers(engine, table, config, shape)
    return open_engine_tiers(engine.proxy, table, config, shape)
