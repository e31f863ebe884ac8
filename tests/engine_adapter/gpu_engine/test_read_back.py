"""What the engine reads of experts for itself, on devices with memory of their own: the file's bytes there, too."""

from __future__ import annotations

import ctypes as ct
from dataclasses import replace

import pytest

from engine_runs.read_back import assert_read_in_pieces, engine_model
from engine_runs.tiered_runs import SMALL
from fake_ggml_gpu.models import gpu_model, gpu_tiers, model_path
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.tensor_models import shards_of, tensor_config, tensor_model

POOL = 64 << 20


@on_fake_gpus
def test_any_piece_through_the_device_s_backend(gpus: GpuSession):
    """Backends that copy in the background would look for the bytes at an address where there are none."""
    path = model_path(gpus, "small", SMALL)
    engine, file = gpus.engine, path.read_bytes()
    with (
        gpu_tiers(gpus, path, 4, host_pool_bytes=POOL) as tiers,
        gpu_model(gpus, tiers) as model,
        engine_model(engine, model) as own,
    ):
        assert model.binding is not None
        begin = engine.symbol("ggml_backend_dev_init", ct.c_void_p, ct.c_void_p, ct.c_char_p)
        backend = begin(model.binding.bindings[0].device, None)
        try:
            matrix = tiers.table.layers[1].matrices[2]
            assert_read_in_pieces(own, file, tiers.table.layers[1], matrix, backend=backend)
            assert own.read(matrix.name, 3, 1000) == file[matrix.file_offset + 3 :][:1000]
        finally:
            engine.symbol("ggml_backend_free", None, ct.c_void_p)(backend)
        assert tiers.stats().l1.misses == 0


@pytest.mark.parametrize("role", ["gate", "down"])
@on_fake_gpus
def test_tensors_in_shards_are_put_together(gpus: GpuSession, role: str):
    """Rows cut apart, and columns, which ggml reads row by row."""
    path = model_path(
        gpus, "small, 512", replace(SMALL, n_ff=512)
    )  # the engine cuts in units of 128 and more
    file = path.read_bytes()
    with (
        tensor_model(gpus, path, tensor_config(path, 4, host_pool_bytes=POOL)) as model,
        engine_model(gpus.engine, model.model) as own,
    ):
        for layer in shards_of(model).table.layers:
            (matrix,) = (each for each in layer.matrices if each.role == role)
            n_bytes = layer.n_experts * matrix.expert_bytes
            assert own.read(matrix.name, 0, n_bytes) == file[matrix.file_offset :][:n_bytes]
        chunk = (
            matrix.expert_bytes // matrix.ne1 if role == "down" else matrix.expert_bytes
        )  # what ggml takes
        begin = 3 * chunk
        assert own.read(matrix.name, begin, 9 * chunk) == file[matrix.file_offset + begin :][: 9 * chunk]
