"""The tiers of a command-line tool, started by our proxy inside the tool's own process (`expertier exec`)."""

from __future__ import annotations

import ctypes as ct
import os
import sys

from expertier.engine_adapter.exec_tool import MODEL_VARIABLE
from expertier.engine_adapter.llama_cpp.tier_binding import TierBinding
from expertier.engine_adapter.proxy_abi import declare_proxy
from expertier.errors import ExpertierError
from expertier.hip import open_device
from expertier.tiers.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.table import ExpertTable


class EmbeddedEngine:
    """The tool's engine: of it only our proxy library is needed, which is loaded already."""

    def __init__(self, proxy_path: str) -> None:
        self.proxy = ct.CDLL(proxy_path)
        declare_proxy(self.proxy)


_bindings: list[TierBinding] = []
"""Kept for as long as the process lives: the engine holds addresses of what they own."""


def start() -> None:
    """Make the tiers for the model that `expertier exec` named, and give them to the engine.

    An error of ours ends the process with status 2, before the tool has loaded anything.
    """
    try:
        manager = TierManager(
            ExpertTable.from_gguf(os.environ[MODEL_VARIABLE]),
            device=open_device("host"),
            config=TierConfig.from_env(),
        )
        binding = TierBinding(EmbeddedEngine(os.environ["GGML_BACKEND_PATH"]), manager)
        binding.serve_all_loads()
        _bindings.append(binding)
    except ExpertierError as error:
        print(f"expertier: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    print(
        f"expertier: {manager.table.path.name}: {sum(manager.slots)} expert slots in {manager.table.n_layers} "
        f"layers, budgets {manager.stats().l1.budget_bytes} + {manager.stats().l2.budget_bytes} bytes",
        file=sys.stderr,
        flush=True,
    )


def stop() -> None:
    """Say at the process's end what the tiers did."""
    for binding in _bindings:
        stats = binding.manager.stats()
        print(
            f"expertier: L1 {stats.l1.hits} hits, {stats.l1.misses} misses; L2 {stats.l2.hits} hits; "
            f"{stats.file.bytes_read} bytes read from the file",
            file=sys.stderr,
            flush=True,
        )
