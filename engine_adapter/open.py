"""Opens an engine: finds it, builds the plugin where that is missing, loads both, and checks the structs' layout."""

from __future__ import annotations

import os
from collections.abc import Sequence

from expertier.engine_adapter.build.engine import Engine
from expertier.engine_adapter.build.locate import find_engine
from expertier.engine_adapter.build.plugin import Plugin, check_defaults, ensure_plugin
from expertier.engine_adapter.build.progress import Progress, silent
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.llama_cpp.rpc_servers import add_rpc_servers


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
