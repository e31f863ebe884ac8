"""Models on a fake device whose decode graphs look experts up on the device."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_runs.tiered_runs import assert_nothing_held
from expertier.engine_adapter.abi import structs as abi
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.llama_cpp import LlamaModel
from fake_ggml_gpu.models import gpu_model, gpu_tiers
from fake_ggml_gpu.process import GpuSession


@contextmanager
def tiered_model(
    gpus: GpuSession,
    path: Path,
    n_slots: int,
    pool_bytes: int,
    *,
    layers_ahead: int = 0,
    may_pause: bool = False,
    captures: bool = True,
) -> Iterator[tuple[LlamaModel, abi.DeviceLookup]]:
    """A model with tiers on a device, and what a device look-up for it takes; nothing is held at the end.

    Without `captures` graphs are queued part by part.
    """
    with (
        gpus.fakes.device_lookup() as calls,
        gpu_tiers(gpus, path, n_slots, host_pool_bytes=pool_bytes) as tiers,
        gpu_model(gpus, tiers) as model,
    ):
        calls.layers_ahead, calls.prefetch_pauses = layers_ahead, int(may_pause)
        if not captures:
            calls.capture_begin = None
        yield model, calls
        assert_nothing_held(tiers)


@contextmanager
def looking_up(
    gpus: GpuSession,
    path: Path,
    n_slots: int,
    pool_bytes: int,
    *,
    layers_ahead: int = 0,
    may_pause: bool = False,
    captures: bool = True,
    spin_limit: int | None = None,
) -> Iterator[LlamaModel]:
    """A model with tiers on a device, whose decode graphs look ids up there; nothing is held at the end.

    With a `spin_limit` a look-up gives up after so many looks at an answer that does not come.
    """
    with tiered_model(
        gpus,
        path,
        n_slots,
        pool_bytes,
        layers_ahead=layers_ahead,
        may_pause=may_pause,
        captures=captures,
    ) as (model, calls):
        if spin_limit is not None:
            calls.spin_limit = spin_limit
        assert open_device_lookup(gpus, model.binding.bindings[0], calls) == ""
        yield model


def open_device_lookup(gpus: GpuSession, binding: TierBinding, calls: abi.DeviceLookup) -> str:
    """Give a device's tiers a device look-up; return why they got none, or in lines what it does without, and why."""
    error = ct.create_string_buffer(4096)
    gpus.engine.proxy.expertier_tiers_open_device_lookup(
        binding._open_handle(), ct.byref(calls), error, len(error)
    )
    return error.value.decode()
