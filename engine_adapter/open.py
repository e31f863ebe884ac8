"""Opens the engine, and the tiers of a model on it.

    open_engine       finds the engine, builds the plugin where that is missing, loads both, checks the layout
    open_tiers        config ─► devices and their traits ─► sizes ─► TierSet, by layers or by shards of every expert
    open_bound_tiers  the same, and binds the tiers to the proxy, for a host that loads the model by itself

Where a step fails, the steps before it are undone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from expertier.engine_adapter.binding.binding_set import BindingSet, bind
from expertier.engine_adapter.binding.tier_binding import ProxyHolder
from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import Plugin, check_defaults, ensure_plugin
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.llama_cpp.layer_tiers import EngineTiers, open_layer_tiers
from expertier.engine_adapter.llama_cpp.rpc_servers import add_rpc_servers
from expertier.engine_adapter.llama_cpp.shard_tiers import open_shard_tiers
from expertier.engine_adapter.opening import closed_if_interrupted
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import ConfigError
from expertier.interrupts import interrupts_deferred
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet


def open_engine(
    llama_cpp: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    *,
    rpc_servers: Sequence[str] = (),
) -> LoadedEngine:
    """Load the installed wheel's engine, or the one built in folder `llama_cpp`, with our plugin for it.

    `rpc_servers` (`host:port`) are servers of llama.cpp's whose devices the engine uses as its own, as RPC0, RPC1, ...

    Raises:
        EngineError: a server does not answer, or the engine cannot use servers.
        EngineMissingError: there is no engine. EngineMismatchError: it is not the engine that the plugin was built for.
        BuildError: the plugin could not be compiled.
    """
    engine, plugin = prepare_engine(llama_cpp, progress)
    loaded = LoadedEngine.load(engine.libraries, plugin.proxy_path, plugin.host_path)
    check_defaults(plugin.info.defaults, loaded.defaults(), engine)
    add_rpc_servers(loaded, rpc_servers)
    return loaded


def prepare_engine(
    llama_cpp: str | os.PathLike[str] | None = None, progress: Progress = silent, *, rebuild: bool = False
) -> tuple[Engine, Plugin]:
    """Find the engine and build its plugin where that is missing; nothing is loaded into this process."""
    engine = find_engine(llama_cpp)
    return engine, ensure_plugin(engine, progress, rebuild=rebuild)


def open_tiers(
    engine: ProxyHolder,
    table: ExpertTable,
    config: TierConfig,
    shape: ContextShape | None = None,
    *,
    splitter: LoadedEngine | None = None,
) -> EngineTiers:
    """Make tiers on the devices that `config.engine_device` names, by layers or by shards (`config.split_mode`).

    `shape` describes the contexts that these devices need room for. `splitter` is the engine that splits the model's
    tensors where the config asks for that; None where the host loads the model by itself, and cannot have it.

    Raises `ConfigError` for a split that the host cannot have, and what `open_layer_tiers` and `open_shard_tiers` do.
    """
    if config.split_mode is SplitMode.LAYER:
        return open_layer_tiers(engine.proxy, table, config, shape)
    if splitter is None:
        raise ConfigError(
            f"MOE_SPLIT_MODE={config.split_mode} was asked for here, where the host loads the model by itself: only "
            "`expertier run`, `serve` and TieredModel split tensors; use MOE_SPLIT_MODE=layer"
        )
    return open_shard_tiers(splitter, table, config, shape)


@dataclass(frozen=True)
class BoundTiers:
    """Tiers that are bound to the proxy, until `close`."""

    tiers: TierSet
    placement: Placement
    binding: BindingSet

    def close(self) -> None:
        """Unbind the tiers and free them, once the engine has freed the model; a second call does nothing.

        Raises `BusyError` while the engine still holds slots; to be closed again later.
        """
        with interrupts_deferred(), ExitStack() as each:
            each.callback(self.tiers.close)
            each.callback(self.binding.close)


@closed_if_interrupted
def open_bound_tiers(
    engine: ProxyHolder,
    table: ExpertTable,
    config: TierConfig,
    shape: ContextShape | None = None,
    *,
    splitter: LoadedEngine | None = None,
) -> BoundTiers:
    """Make tiers as `open_tiers` does, and bind them. Raises what `open_tiers` and `bind` do; nothing is open then."""
    tiers, placement = open_tiers(engine, table, config, shape, splitter=splitter)
    try:
        return BoundTiers(tiers, placement, bind(engine, tiers, placement))
    except BaseException:
        tiers.close()
        raise
