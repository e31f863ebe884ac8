"""Tiers whose slab has the engine's compute buffers in it, and what must hold of the two at any time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from expertier.engine_adapter.binding import slab_compute
from expertier.engine_adapter.binding.slab_compute import ComputeCounts
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.placement.engine_device import EngineDevice, device_of
from expertier.errors import DeviceError
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB
from fake_ggml_gpu.device_lookups import open_device_lookup
from fake_ggml_gpu.models import DEVICE, gpu_model
from fake_ggml_gpu.process import GpuSession


@contextmanager
def computing_model(
    gpus: GpuSession,
    path: Path,
    n_slots: int,
    *,
    compute_bytes: int = 4 * MIB,
    host_pool_bytes: int = 64 * MIB,
    stream_tokens: int | str = "auto",
    move_cost_bytes: int = 0,
    device: str = DEVICE,
) -> Iterator[LlamaModel]:
    """A model with `n_slots` slots a layer beside `compute_bytes` to compute in; all is sound at the end."""
    table = ExpertTable.from_gguf(path)
    config = TierConfig(
        expert_cache_bytes=sum(demand.bytes_for(n_slots) for demand in table.layer_demands()),
        host_pool_bytes=host_pool_bytes,
        stream_tokens=stream_tokens,
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        TierManager(
            table, device=device_of(gpus.engine.proxy, device), config=config, compute_bytes=compute_bytes
        ) as tiers,
    ):
        patch.setattr(slab_compute, "MOVE_COST_BYTES", move_cost_bytes)
        assert set(tiers.slots) == {n_slots}
        with gpu_model(gpus, tiers, device=device) as model:
            yield model
            assert_sound(model)
        tiers.check_valid()


def counts_of(model: LlamaModel) -> ComputeCounts:
    """Counts of the buffers that the model's engine computes in."""
    assert model.binding is not None
    counts = model.binding.compute_counts()
    assert counts is not None
    return counts


def assert_sound(model: LlamaModel) -> None:
    """Assert that nobody computes where slots are, and that every slot has its expert's bytes (I1, I2)."""
    assert model.binding is not None
    tiers = model.binding.bindings[0].manager
    tiers.drain()  # layers that have become whole are completed in the background
    counts = counts_of(model)
    layout = tiers._slab.layout
    layout.check_valid()
    assert counts.needed_bytes <= counts.boundary_bytes == layout.compute_bytes
    assert layout.compute_bytes <= layout.places(0)[0].offset
    found = np.empty(
        max(matrix.expert_bytes for layer in tiers.table.layers for matrix in layer.matrices), np.uint8
    )
    with tiers.table.path.open("rb") as file:
        for number, layer in enumerate(tiers.table.layers):
            for expert, slot in tiers._residency.residents(number).items():
                for matrix, place in zip(layer.matrices, layout.places(number), strict=True):
                    span = matrix.span(expert)
                    at = tiers._slab.base + place.offset + slot * place.stride
                    tiers._device.copy_out(found.ctypes.data, at, span.n_bytes)
                    file.seek(span.offset)
                    assert found[: span.n_bytes].tobytes() == file.read(span.n_bytes), (
                        f"layer {number}: slot {slot} has other bytes than expert {expert}'s {matrix.role}"
                    )


class FailingMoves:
    """Makes the n-th row of a move's work fail, once: a copy or a zero. The rows before it are queued on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.failed = 0
        self._fails_at: int | None = None
        relocate = EngineDevice.relocate

        def failing(device, moves, zeros, stream=0):
            for row in range(len(moves)):
                self._count(device)
                relocate(device, moves[row : row + 1], zeros[:0], stream)
            for row in range(len(zeros)):
                self._count(device)
                relocate(device, moves[:0], zeros[row : row + 1], stream)

        monkeypatch.setattr(EngineDevice, "relocate", failing)

    def fail_call(self, n: int) -> None:
        """Make the n-th row from now on fail."""
        self._fails_at = self.calls + n

    @property
    def is_armed(self) -> bool:
        """Whether that row is still to come."""
        return self._fails_at is not None

    def _count(self, device: EngineDevice) -> None:
        self.calls += 1
        if self.calls == self._fails_at:
            self._fails_at = None
            self.failed += 1
            raise DeviceError(f"{device.name}: call {self.calls} was told to fail")


@contextmanager
def opened_device_lookup(gpus: GpuSession, model: LlamaModel, *, captures: bool = True) -> Iterator[None]:
    """Have the model's decode graphs look ids up on the device, inside of the block and until the model is closed.

    Without `captures` they are queued part by part.
    """
    assert model.binding is not None
    with gpus.fakes.device_lookup() as calls:
        if not captures:
            calls.capture_begin = None
        assert open_device_lookup(gpus, model.binding.bindings[0], calls) == ""
        yield
