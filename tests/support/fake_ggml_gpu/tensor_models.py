"""Models whose tensors are split over the two fake devices: stock, and through tiers of shards on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from fake_ggml_gpu.models import Logits, logits_of
from fake_ggml_gpu.process import GpuSession

BOTH = "FAKE0,FAKE1"


def stock_tensor_logits(
    gpus: GpuSession, path: Path, prompt: Sequence[int], n_tokens: int, *, n_ubatch: int = 512
) -> Logits:
    """All logits of a prompt and of `n_tokens` more, of stock llama.cpp with --split-mode tensor; each is run once."""
    return _stock(gpus.engine, path, tuple(prompt), n_tokens, n_ubatch)


@cache
def _stock(engine: LoadedEngine, path: Path, prompt: tuple[int, ...], n_tokens: int, n_ubatch: int) -> Logits:
    with LlamaModel.open(engine, path, repack=False, inner_device=BOTH, split_tensors=True) as model:
        return logits_of(model, prompt, n_tokens, n_ubatch=n_ubatch)


def tensor_config(path: Path, n_slots: int, **more: object) -> TierConfig:
    """Budgets for `n_slots` slots a layer on both devices."""
    demands = ExpertTable.from_gguf(path).layer_demands()
    slots = sum(demand.bytes_for(n_slots) + demand.fixed_bytes for demand in demands)
    return TierConfig(
        expert_cache_bytes=slots,
        engine_device=BOTH,
        split_mode=SplitMode.TENSOR,
        **{"host_pool_bytes": 0, **more},
    )


@contextmanager
def tensor_model(gpus: GpuSession, path: Path, config: TierConfig) -> Iterator[TieredModel]:
    """A model with shards of its experts in both devices' slots; valid at the end."""
    with TieredModel.open(gpus.engine, ExpertTable.from_gguf(path), config) as model:
        yield model
        model.tiers.check_valid()


def shards_of(model: TieredModel) -> TierSet:
    """The tiers of such a model."""
    assert model.tiers.split_source is not None
    return model.tiers
