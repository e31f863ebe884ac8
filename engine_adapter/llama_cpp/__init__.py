"""Runs llama.cpp inside this process, with or without the tiers.

    engine = LoadedEngine.load(engine_files, plugin)       one a process
    model = LlamaModel.open(engine, path, tiers=tier_set)   tiers=None: the stock engine
    context = model.context(n_ctx=4096)
    context.decode(tokens)

The engine is called through a small host library compiled against its own headers; Python knows none of its
structs (D14).
"""

from __future__ import annotations

from expertier.engine_adapter.abi.counters import ProxyCounters
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.llama_cpp.context import LlamaContext
from expertier.engine_adapter.llama_cpp.model import LlamaModel, LoadCounts

__all__ = ["LlamaContext", "LlamaModel", "LoadCounts", "LoadedEngine", "ProxyCounters"]
