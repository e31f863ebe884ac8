"""Models on one of the named devices or on both, by layers or by tensors: stock, and through the tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import EngineError
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.config.config import TierConfig
from expertier.tiers.config.split_mode import SplitMode
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import Logits, logits_of, model_path
from model_files.architecture_models import MODELS
from real_devices.process import DeviceSession

LAYERS = 5
N_CTX = 512
SHAPE = ContextShape(n_ctx=N_CTX, n_ubatch=512, full_windows=True)
KINDS = {
    kind: replace(MODELS[kind], layers=LAYERS, n_ff=512, dense_type="Q8_0")  # n_ff: a block for each of two
    for kind in ("qwen3moe", "gpt-oss", "qwen3moe, mixed")
}


class Split(StrEnum):
    """How devices have a model."""

    ONE = "one"
    """The first device has all of it."""
    LAYER = "layer"
    TENSOR = "tensor"


EVERY_SPLIT = tuple(Split)
ON_TWO = (Split.LAYER, Split.TENSOR)


def device_of_split(session: DeviceSession, split: Split) -> str:
    """Return the devices as MOE_DEVICE takes them; skips where there are too few, or they cannot split so."""
    if split is Split.ONE:
        return session.devices[0]
    if len(session.devices) < 2:
        pytest.skip(f"this takes two devices, and there is {session.devices[0]} alone")
    names = ",".join(session.devices[:2])
    if split is Split.TENSOR and (refusal := _refusal_of_tensors(session, names)):
        pytest.skip(f"stock llama.cpp does not split tensors over {names}: {refusal}")
    return names


@cache
def _refusal_of_tensors(session: DeviceSession, names: str) -> str:
    """Return why stock does not do it, or nothing."""
    path = write_kind(session, "qwen3moe")
    try:
        with (
            LlamaModel.open(
                session.engine, path, repack=False, inner_device=names, split_tensors=True
            ) as model,
            model.context(n_ctx=N_CTX, n_threads=1),
        ):
            return ""
    except EngineError as error:
        return str(error)


def write_kind(session: DeviceSession, kind: str) -> Path:
    """Write a model of KINDS, the first time."""
    return model_path(session, f"pair {kind}", KINDS[kind])


@contextmanager
def stock_model(session: DeviceSession, path: Path, split: Split) -> Iterator[LlamaModel]:
    """Open the model as stock llama.cpp has it on the same devices, split the same way."""
    names = device_of_split(session, split)
    with LlamaModel.open(
        session.engine, path, repack=False, inner_device=names, split_tensors=split is Split.TENSOR
    ) as model:
        yield model


def stock_logits(
    session: DeviceSession, path: Path, split: Split, prompt: Sequence[int], n_tokens: int
) -> Logits:
    """All logits of a prompt and of `n_tokens` more; each is run once."""
    return _stock_logits(session, path, split, tuple(prompt), n_tokens)


@cache
def _stock_logits(
    session: DeviceSession, path: Path, split: Split, prompt: tuple[int, ...], n_tokens: int
) -> Logits:
    with stock_model(session, path, split) as model:
        return logits_of(model, prompt, n_tokens)


def config_of(session: DeviceSession, path: Path, split: Split, n_slots: int, **more: Any) -> TierConfig:
    """Budgets for exactly `n_slots` slots a layer; what the tests leave open is as the MOE_ variables say."""
    demands = ExpertTable.from_gguf(path).layer_demands()
    fixed = sum(demand.fixed_bytes for demand in demands) if split is Split.TENSOR else 0  # once a device
    wanted: dict[str, Any] = {
        "expert_cache_bytes": sum(demand.bytes_for(n_slots) for demand in demands) + fixed,
        "host_pool_bytes": 0,
        "engine_device": device_of_split(session, split),
        "split_mode": SplitMode.TENSOR if split is Split.TENSOR else SplitMode.LAYER,
    }
    return replace(TierConfig.from_env(), **{**wanted, **more})


@contextmanager
def tiered(
    session: DeviceSession,
    path: Path,
    split: Split,
    n_slots: int,
    *,
    shape: ContextShape = SHAPE,
    **more: Any,
) -> Iterator[TieredModel]:
    """Open the model with so many slots a layer; `more` are other wishes. Valid at the end."""
    config = config_of(session, path, split, n_slots, **more)
    with TieredModel.open(session.engine, ExpertTable.from_gguf(path), config, shape=shape) as model:
        assert set(model.tiers.slots) == {n_slots}, model.tiers.slots
        yield model
        model.tiers.check_valid()


def managers_of(model: TieredModel) -> Sequence[TierManager]:
    """The tiers of each device, in the devices' order."""
    return model.tiers.managers
