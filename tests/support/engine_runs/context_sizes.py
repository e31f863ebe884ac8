"""What a context really takes, as the engine logs it: to hold the ledger's estimates against."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.planner.budget.context_memory import ContextShape
from expertier.units import MIB

_KV, _COMPUTE = r"(?:KV|RS) buffer size", r"compute buffer size"


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """Bytes of a context's caches and of its compute buffers, all devices together; to a hundredth of a MiB each."""

    cache_bytes: int
    compute_bytes: int


def measure_context(engine: LoadedEngine, model: LlamaModel, shape: ContextShape) -> ContextSizes:
    """Open a context of this shape, of one sequence and F16, and return what the engine says of its buffers."""
    logs: list[str] = []
    take_log = engine.take_log

    def keep(level: int = 3) -> str:
        text = take_log(level)
        logs.append(text)
        return text

    engine.take_log = keep  # type: ignore[method-assign]
    try:
        model.context(
            n_ctx=shape.n_ctx,
            n_batch=max(2048, shape.n_ubatch),
            n_ubatch=shape.n_ubatch,
            n_threads=1,
            flash_attention="on" if shape.flash_attention else "off",
        ).close()
    finally:
        del engine.take_log
    log = "".join(logs)
    return ContextSizes(_total(_KV, log), _total(_COMPUTE, log))


def _total(what: str, log: str) -> int:
    return round(MIB * sum(float(size) for size in re.findall(rf"{what} =\s+([\d.]+) MiB", log)))
