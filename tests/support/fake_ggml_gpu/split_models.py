"""Models whose layers are split over the two fake devices: stock, and through tiers on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.engine_adapter.placement.placement import Placement
from expertier.tiers.config.config import TierConfig
from expertier.tiers.layer_division import DeviceShare, LayerDivision
from expertier.tiers.model.block_weights import read_block_weights
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from fake_ggml_gpu.models import Logits, model_path, stock_logits
from fake_ggml_gpu.process import GpuSession
from model_files.architecture_models import MODELS

BOTH = "FAKE0,FAKE1"
LAYERS = 5
KINDS = {kind: replace(shape, layers=LAYERS) for kind, shape in MODELS.items() if not shape.layer_types}


def split_path(gpus: GpuSession, kind: str) -> Path:
    """A model of five layers with experts."""
    return model_path(gpus, f"split {kind}", KINDS[kind])


def cut(path: Path, first: int) -> Placement:
    """So many layers with experts on the first device, the others and the output on the second."""
    before = ExpertTable.from_gguf(path).layers[first].block
    return Placement(("FAKE0", "FAKE1"), (before, read_block_weights(path).n_blocks + 1 - before))


def stock_split_logits(
    gpus: GpuSession, path: Path, prompt: Sequence[int], n_tokens: int, *, n_ubatch: int = 512
) -> Logits:
    """All logits of a prompt and of `n_tokens` more, of the stock engine with its layers on both devices."""
    return stock_logits(gpus, path, prompt, n_tokens, n_ubatch=n_ubatch, device=BOTH)


@contextmanager
def split_tiers(
    gpus: GpuSession,
    path: Path,
    n_slots: int,
    placement: Placement,
    *,
    host_pool_bytes: int = 0,
    stream_tokens: int | str = "auto",
) -> Iterator[TierSet]:
    """Tiers with exactly `n_slots` slots a layer, each layer's in the memory of its device; valid at the end."""
    table = ExpertTable.from_gguf(path)
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    config = TierConfig(
        expert_cache_bytes=budget, host_pool_bytes=host_pool_bytes, stream_tokens=stream_tokens
    )
    parts = [
        DeviceShare(device_of(gpus.engine.proxy, name), layers)
        for name, layers in zip(placement.devices, placement.layers(table), strict=True)
    ]
    with TierSet(LayerDivision(table, parts), config=config) as tiers:
        assert set(tiers.slots) == {n_slots}
        yield tiers
        tiers.check_valid()


@contextmanager
def split_model(gpus: GpuSession, tiers: TierSet, placement: Placement) -> Iterator[LlamaModel]:
    """The tiers' model on the devices."""
    with LlamaModel.open(gpus.engine, tiers.table.path, tiers=tiers, placement=placement) as model:
        yield model
