"""Opens a model for one row, stock or through the tiers, on any of the engine's devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertier.engine_adapter.engine_tiers import open_engine_tiers
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.tiers.config import TierConfig
from expertier.tiers.table import ExpertTable
from expertier.tiers.tier_set import Tiers


@dataclass(frozen=True)
class Placement:
    """Where the experts are: `side` as in `rows.Row`, with budgets in bytes where it has some.

    `device` may be several, with commas between them, which share the layers.
    """

    side: str
    device: str
    cache_bytes: int = 0
    host_bytes: int = 0


@contextmanager
def opened(
    engine: LoadedEngine, path: str | Path, placement: Placement
) -> Iterator[tuple[LlamaModel, Tiers | None]]:
    """Load the model, and close it and its tiers at the end."""
    if placement.side != "ours":
        in_ram = placement.side != "vram"
        with LlamaModel.open(
            engine,
            path,
            repack=False,  # with it, experts in RAM are not the bytes that the others compute with
            inner_device=placement.device,
            experts_in_ram=in_ram,
            mapped=not in_ram,
        ) as model:
            yield model, None
        return
    config = replace(
        TierConfig.from_env(),
        engine_device=placement.device,
        expert_cache_bytes=placement.cache_bytes,
        host_pool_bytes=placement.host_bytes,
    )
    tiers, placed = open_engine_tiers(engine.proxy, ExpertTable.from_gguf(path), config)
    with tiers, LlamaModel.open(engine, path, tiers=tiers, placement=placed) as model:
        yield model, tiers
