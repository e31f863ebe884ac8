"""The ledger's estimates of a context against what the engine allocates, on models the size of published ones.

    python benchmarks/compute_buffer.py [--json]

The models are headers with holes (a few MiB of disk each) and few layers, which no compute buffer depends on; their
experts are never read. On the CPU backend, the only one that this was tried on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.models.model_shape import ModelShape
from expertier.engine_adapter.models.synth import write_model
from expertier.engine_adapter.open import open_engine
from expertier.hip import open_device
from expertier.planner.budget.allocate import floor_bytes
from expertier.planner.budget.context_memory import ContextShape, cache_bytes, compute_bytes
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from expertier.units import MIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from engine_runs.context_sizes import measure_context

_QWEN = ModelShape(
    layers=4, experts=128, top_k=8, n_embd=2048, n_ff=768, heads=32, kv_heads=4, head_dim=128, vocab=151936,
    seed=1, gate_up_type="Q4_K", down_type="Q6_K", dense_type="Q8_0", context_length=131072,
)  # fmt: skip
_GPT_OSS = replace(
    _QWEN, architecture="gpt-oss", experts=32, top_k=4, n_embd=2880, n_ff=2880, heads=64, kv_heads=8, head_dim=64,
    vocab=201088, gate_up_type="MXFP4", down_type="MXFP4",
)  # fmt: skip

MODELS = {
    "like Qwen3-30B-A3B": _QWEN,
    "like gpt-oss-20b": _GPT_OSS,
    "like gpt-oss-120b": replace(_GPT_OSS, experts=128),
    "512 experts": replace(_QWEN, experts=512, top_k=10, n_embd=3072, n_ff=1024, down_type="Q4_K"),
    "like OLMoE": replace(_QWEN, architecture="olmoe", experts=64, n_ff=1024, heads=16, kv_heads=16, vocab=50304),
    "like Mixtral": replace(
        _QWEN, architecture="llama", experts=8, top_k=2, n_embd=4096, n_ff=14336, kv_heads=8, vocab=32000
    ),
    "DeepSeek, small": replace(
        _QWEN, architecture="deepseek2", layers=3, experts=64, top_k=6, n_ff=1408, heads=16, kv_heads=1, head_dim=256,
        vocab=102400, down_type="Q8_0",
    ),
    "like GLM-4.5-Air": replace(
        _QWEN, architecture="glm4moe", layers=3, n_embd=4096, n_ff=1408, heads=96, kv_heads=8, vocab=151552,
        down_type="Q8_0",
    ),
    "like Llama 4 Scout": replace(
        _QWEN, architecture="llama4", layers=2, experts=16, top_k=1, n_embd=5120, n_ff=8192, heads=40, kv_heads=8,
        vocab=202048,
    ),
    "Nemotron, small": replace(
        _QWEN, architecture="nemotron_h_moe", top_k=6, n_embd=2688, n_ff=1856, kv_heads=2, vocab=131072,
        expert_layout="no gate", gate_up_type="Q4_0", down_type="Q4_0",
    ),
}  # fmt: skip

SHAPES = [
    ContextShape(n_ctx, n_ubatch, full_windows=True, flash_attention=flash)
    for n_ctx, n_ubatch, flash in (
        (4096, 512, True), (32768, 2048, True), (32768, 512, True), (8192, 512, False),
        (32768, 1, True), (32768, 8, True),
    )
]  # fmt: skip


def main() -> None:
    """Measure all models in all shapes and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    engine = open_engine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model_shape in MODELS.items():
            path = write_model(Path(folder) / "model.gguf", model_shape, holes=True)
            geometry, table = read_geometry(path), ExpertTable.from_gguf(path)
            config = TierConfig(expert_cache_bytes=floor_bytes(table.layer_demands()))
            with (
                TierManager(table, device=open_device("host"), config=config) as tiers,
                LlamaModel.open(engine, path, tiers=TierSet.of(tiers)) as model,
            ):
                for shape in SHAPES:
                    found = measure_context(engine, model, shape)
                    row = {
                        "model": name, "n_ctx": shape.n_ctx, "n_ubatch": shape.n_ubatch, "flash": shape.flash_attention,
                        "cache_bytes": found.cache_bytes, "cache_planned": cache_bytes(geometry, shape),
                        "compute_bytes": found.compute_bytes, "compute_planned": compute_bytes(geometry, shape),
                    }  # fmt: skip
                    rows.append(row)
                    if not arguments.json:
                        _print(row)
            path.unlink()
    if arguments.json:
        print(json.dumps(rows))


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:20s} ctx {row['n_ctx']:6d} batch {row['n_ubatch']:5d} {'flash' if row['flash'] else '     '}  "
        f"cache {row['cache_planned'] / MIB:8.2f} of {row['cache_bytes'] / MIB:8.2f}  "
        f"compute {row['compute_planned'] / MIB:8.2f} of {row['compute_bytes'] / MIB:8.2f} MiB: "
        f"{row['compute_planned'] / row['compute_bytes']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
