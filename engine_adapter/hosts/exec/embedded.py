"""The tiers of a command-line tool, which our proxy starts inside the tool's own process (`expertier exec`).

The tool's main thread enters Python only for misses, and the tool handles its own signals. So SIGUSR1 is answered
on a thread of ours (signals.py), and the last summary is logged when the tool's process ends by itself (embedded.cpp).
"""

from __future__ import annotations

import ctypes as ct
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from expertier.engine_adapter.abi.functions import declare_proxy
from expertier.engine_adapter.abi.type_sizes import EngineTypes, block_size
from expertier.engine_adapter.binding.binding_set import BindingSet
from expertier.engine_adapter.hosts.exec.tool import MODEL_VARIABLE, SHAPE_VARIABLE
from expertier.engine_adapter.open import open_bound_tiers
from expertier.engine_adapter.telemetry.signals import answer_signal
from expertier.engine_adapter.telemetry.telemetry import Telemetry, say_disabled, show_events
from expertier.errors import ExpertierError
from expertier.failures import explain
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.model.type_sizes import BlockSize


class EmbeddedEngine:
    """The tool's engine, of which only our proxy library is used; the tool has loaded that already."""

    def __init__(self, proxy_path: str) -> None:
        self.library_paths = (Path(proxy_path),)
        self.proxy = ct.CDLL(proxy_path)
        declare_proxy(self.proxy)

    def block_size(self, ggml_type: int) -> BlockSize | None:
        """Return the block of one of the engine's types; None where this build does not have the type."""
        return block_size(self.proxy.expertier_proxy_block_size, ggml_type)


_running: list[tuple[BindingSet, Telemetry]] = []
"""Objects that live as long as the process, because the engine holds addresses of their memory."""
_shown = ExitStack()


def start() -> None:
    """Make the tiers for the model that `expertier exec` named, give them to the engine, and log that.

    An error of ours ends the process with status 2, before the tool has loaded anything.
    """
    _shown.enter_context(show_events())
    model = os.environ[MODEL_VARIABLE]
    try:
        config = TierConfig.from_env()
        engine = EmbeddedEngine(os.environ["GGML_BACKEND_PATH"])
        shape = ContextShape(**json.loads(os.environ[SHAPE_VARIABLE]))
        table = ExpertTable.from_gguf(model, EngineTypes(lambda: engine))
        bound = open_bound_tiers(engine, table, config, shape)
        binding, telemetry = bound.binding, Telemetry(bound.tiers, config)
        binding.on_fill = telemetry.note_fill
        binding.serve_all_loads()
        _running.append((binding, telemetry))
    except (ExpertierError, OSError, MemoryError) as error:
        told = str(error) if isinstance(error, ExpertierError) else explain(error)
        say_disabled(Path(model).name, told)
        print(f"expertier: {told}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except Exception as error:
        say_disabled(Path(model).name, f"{type(error).__name__}: {error}")
        raise
    telemetry.enabled()
    answer_signal(signal.SIGUSR1, telemetry.summary)


def stop() -> None:
    """Log the tiers' counts at the end of the process."""
    for _, telemetry in _running:
        telemetry.summary()
