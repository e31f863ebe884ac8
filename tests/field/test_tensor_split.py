"""Rows that tensor split brings up, over two fake GPUs that share every expert.

Each test bears the number of its row in docs/field-failures.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import UnsupportedLayoutError
from expertier.tiers.model.table import ExpertTable
from fake_ggml_gpu.models import assert_same, logits_of, model_path
from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.tensor_models import shards_of, stock_tensor_logits, tensor_config, tensor_model

PROMPT, TOKENS = prompt_tokens(24), 6


@pytest.mark.parametrize("n_ff", [256, 512, 768])
@on_fake_gpus
def test_row_15_shards_are_whole_blocks_or_refused_with_the_reason(gpus: GpuSession, n_ff):
    """Blocks of 256 elements: two devices cannot share one, and of three one has more than the other."""
    path = model_path(gpus, f"shards of {n_ff}", replace(SMALL, layers=2, n_ff=n_ff))
    table, config = ExpertTable.from_gguf(path), tensor_config(path, 5)
    if n_ff == 256:
        with pytest.raises(UnsupportedLayoutError, match="device 0 of the tensor split would get no row"):
            TieredModel.open(gpus.engine, table, config)
        return
    expected = stock_tensor_logits(gpus, path, PROMPT, TOKENS)
    with tensor_model(gpus, path, config) as model:
        assert_same(logits_of(model.model, PROMPT, TOKENS), expected)
        parts = [manager.table for manager in shards_of(model).managers]
    for layer, matrices in enumerate(zip(*(part.layers[1].matrices for part in parts), strict=True)):
        rows = [matrix.expert_bytes for matrix in matrices]
        assert sum(rows) == table.layers[1].matrices[layer].expert_bytes
        assert all(n % matrix.type_bytes == 0 for n, matrix in zip(rows, matrices, strict=True))


@on_fake_gpus
def test_row_17_each_device_reads_its_own_shards_alone(gpus: GpuSession):
    """A graph that touches another device's memory is a fault of these devices; only sums cross."""
    path = model_path(gpus, "shards of 512", replace(SMALL, layers=2, n_ff=512))
    expected = stock_tensor_logits(gpus, path, PROMPT, TOKENS)
    before = [device.counters() for device in gpus.fakes.devices]
    with tensor_model(gpus, path, tensor_config(path, 5)) as model:
        assert_same(logits_of(model.model, PROMPT, TOKENS), expected)
        assert all(manager.stats().l1.misses > 0 for manager in shards_of(model).managers)
    after = [device.counters() for device in gpus.fakes.devices]
    assert gpus.fakes.take_faults() == ""
    for new, old in zip(after, before, strict=True):
        assert new["async_copies"] == old["async_copies"], "bytes went from one device to the other"
        assert new["allreduces"] > old["allreduces"]
