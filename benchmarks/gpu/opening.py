"""Opens a model for one row, stock or through the tiers, on any of the engine's devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.open import open_tiers
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet


@dataclass(frozen=True)
class Placement:
    """Where the experts are: `side` as in `rows.Row`, with budgets in bytes where it has some.

    `device` may be several, with commas between them, which share the layers; with MOE_SPLIT_MODE=tensor, all tensors.
    """

    side: str
    device: str
    cache_bytes: int = 0
    host_bytes: int = 0


@contextmanager
def opened(
    engine: LoadedEngine, path: str | Path, placement: Placement, shape: ContextShape
) -> Iterator[tuple[LlamaModel, TierSet | None]]:
    """Load the model, and close it and its tiers at the end.

    Where the engine computes in the slab, that has room for a context of `shape` beside the cache's bytes: as much as
    the other sides allocate apart.
    """
    shares_tensors = "," in placement.device and TierConfig.from_env().split_mode is SplitMode.TENSOR
    if placement.side != "ours":
        in_ram = placement.side != "vram"
        with LlamaModel.open(
            engine,
            path,
            repack=False,  # with it, experts in RAM are not the bytes that the others compute with
            inner_device=placement.device,
            split_tensors=shares_tensors,
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
    table = ExpertTable.from_gguf(path)
    if shares_tensors:  # guards and alignment are there once a device
        guards = placement.device.count(",") * sum(demand.fixed_bytes for demand in table.layer_demands())
        config = replace(config, expert_cache_bytes=placement.cache_bytes + guards)
        tiers, placed = open_tiers(engine, table, config, splitter=engine)
    else:
        tiers, placed = open_tiers(engine, table, replace(config, split_mode=SplitMode.LAYER), shape)
    with tiers, LlamaModel.open(engine, path, tiers=tiers, placement=placed) as model:
        yield model, tiers
