"""Models on the fake devices: stock and through the tiers, with a number of slots of one's choice."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from expertier.engine_adapter.llama_cpp import LlamaContext, LlamaModel, LoadedEngine
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import write_model
from expertier.engine_adapter.placement.engine_device import device_of
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from fake_ggml_gpu.process import GpuSession
from limits.waits import joined

Logits = npt.NDArray[np.float32]

DEVICE = "FAKE0"
_N_CTX = 512


class HasFolder(Protocol):
    """A session with a folder for files that tests share."""

    @property
    def folder(self) -> Path:
        """The folder's path."""


def model_path(gpus: HasFolder, kind: str, shape: ModelShape) -> Path:
    """The model of this shape, written the first time."""
    path = gpus.folder / re.sub(r"\W+", "_", f"{kind}.gguf")
    return path if path.exists() else write_model(path, shape)


@contextmanager
def gpu_tiers(
    gpus: GpuSession,
    path: Path,
    n_slots: int,
    *,
    host_pool_bytes: int = 0,
    stream_tokens: int | str = "auto",
    device: str = DEVICE,
    follow_demand: bool | Literal["auto"] = "auto",
    fill_pool: bool = False,
) -> Iterator[TierManager]:
    """Tiers with exactly `n_slots` slots a layer in the device's memory; valid at the end.

    Without `fill_pool` the host pool holds the experts that were missed and no more, however late it is looked at.
    """
    table = ExpertTable.from_gguf(path)
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    config = TierConfig(
        expert_cache_bytes=budget,
        host_pool_bytes=host_pool_bytes,
        stream_tokens=stream_tokens,
        follow_demand=follow_demand,
        fill_pool=fill_pool,
    )
    with TierManager(table, device=device_of(gpus.engine.proxy, device), config=config) as tiers:
        assert set(tiers.slots) == {n_slots}
        yield tiers
        tiers.check_valid()


@contextmanager
def gpu_model(gpus: GpuSession, tiers: TierManager, *, device: str = DEVICE) -> Iterator[LlamaModel]:
    """The tiers' model on the device."""
    with LlamaModel.open(
        gpus.engine, tiers.table.path, tiers=TierSet.of(tiers), inner_device=device
    ) as model:
        yield model


def logits_of(
    model: LlamaModel, prompt: Sequence[int], n_tokens: int, *, n_ubatch: int = 512, n_threads: int = 1
) -> Logits:
    """All logits of a prompt and of `n_tokens` more, in a context of their own."""
    with model.context(n_ctx=_N_CTX, n_ubatch=n_ubatch, n_threads=n_threads) as context:
        return logits_in(context, prompt, n_tokens)


def logits_in(context: LlamaContext, prompt: Sequence[int], n_tokens: int) -> Logits:
    """All logits of a prompt and of `n_tokens` more, in a context that first forgets what it had."""
    context.forget()
    return np.stack(generate(context, prompt, n_tokens, keep_logits=True).logits)


def stock_logits(
    gpus: GpuSession,
    path: Path,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    n_ubatch: int = 512,
    device: str = DEVICE,
) -> Logits:
    """What `logits_of` returns for the stock engine on the device; each run is made once."""
    return _stock_logits(gpus.engine, path, tuple(prompt), n_tokens, n_ubatch, device)


@cache
def _stock_logits(
    engine: LoadedEngine, path: Path, prompt: tuple[int, ...], n_tokens: int, n_ubatch: int, device: str
) -> Logits:
    with LlamaModel.open(engine, path, repack=False, inner_device=device) as model:
        return logits_of(model, prompt, n_tokens, n_ubatch=n_ubatch)


def assert_same(found: Logits, expected: Logits) -> None:
    """Assert that the logits are the same, bit for bit, and all finite."""
    assert np.isfinite(expected).all()
    assert found.shape == expected.shape, f"{found.shape} and {expected.shape}"
    different = np.flatnonzero((found != expected).any(axis=1))
    assert not different.size, (
        f"{different.size} of {len(found)} rows differ, first {different[:8]}; "
        f"at most by {np.nanmax(np.abs(found - expected))}, NaNs: {np.isnan(found).sum()}"
    )
    assert found.tobytes() == expected.tobytes()


@contextmanager
def prefetched_meanwhile(tiers: TierManager, seed: int) -> Iterator[None]:
    """Have random experts prefetched by another thread inside of the block, as a predictor's hints have them."""
    random, done = np.random.default_rng(seed), threading.Event()

    def hint() -> None:
        while not done.wait(0.001):  # a pause: between two hints
            layer = int(random.integers(tiers.table.n_layers))
            experts = random.choice(tiers.table.layers[layer].n_experts, 2, replace=False).tolist()
            tiers.prefetch(layer, experts, into=("l1", "l2")[random.integers(2)])

    thread = threading.Thread(target=hint, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        joined(thread)
        tiers.cancel_prefetches()
        tiers.drain()
