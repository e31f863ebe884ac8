"""The rows of `benchmarks/gpu_engine.py --devices 2`, on the fake GPUs: each replays its routing under either split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_ggml_gpu.process import GpuSession, on_fake_gpus
from fake_ggml_gpu.split_models import BOTH

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STEPS = 6


@pytest.mark.parametrize("split", ["layer", "tensor"])
@on_fake_gpus
def test_each_row_replays(gpus: GpuSession, split):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_SPLIT_MODE", split)
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        from gpu import row_run
        from gpu.models import ensure_model
        from gpu.opening import Placement
        from gpu.rows import Row

        from expertier.tiers.model.table import ExpertTable

        model = ensure_model(gpus.folder, "small", steps=STEPS + 2, trace=None, say=lambda _: None)
        table = ExpertTable.from_gguf(model.path)
        for name in ("vram", "ncmoe", "ours-50"):
            row = Row.parse(name)
            is_ours = row.side == "ours"
            found: list[dict] = []
            patch.setattr(row_run, "tell", found.append)
            placement = Placement(
                row.side,
                BOTH,
                row.cache_bytes(model, table) if is_ours else 0,
                row.host_bytes(model, table) if is_ours else 0,
            )
            asked = row_run.RowOptions(
                path=model.path, placement=placement, tokens=model.tokens, warm=2, steps=STEPS, prefill_sizes=[40],
                n_ctx=128, n_ubatch=64, n_threads=1, flash_attention="auto", is_cold=False, llama_cpp=None,
            )  # fmt: skip
            row_run.measure(gpus.engine, asked)
            assert found[-1]["replays"], (name, "the output is wrong")
            assert found[-1]["decode"]["steps"] == STEPS
            splits = found[-1]["n_graph_splits"]
            if name == "vram":
                of_stock = splits
            elif name == "ncmoe":
                assert splits > of_stock, "its experts are on the CPU"
            else:
                assert splits == of_stock
                assert found[-1]["decode"]["counts"]["l1.misses"] > 0
