"""Checks a freshly built plugin: runs one MUL_MAT_ID through the proxy and compares the result with NumPy's.

Runs as a process of its own (`python -m expertier.engine_adapter.llama_cpp.selftest --proxy P --host H LIBRARY...`),
because libraries that do not fit together may crash. The last line of its output is a JSON object: either `ok` is true
and `ggml_version`, `api_version`, `defaults` and `devices` follow, or `ok` is false and `error` says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expertier.children import run_as_child
from expertier.engine_adapter.abi.loaded_engine import LoadedEngine
from expertier.engine_adapter.binding.tier_binding import TierBinding
from expertier.engine_adapter.models.synth import ModelShape, write_model
from expertier.errors import EngineMismatchError, ExpertierError
from expertier.failures import explain
from expertier.hip import open_device
from expertier.interrupts import interrupts_deferred
from expertier.temporary_folder import temporary_folder
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.matrix import ExpertMatrix
from expertier.tiers.model.table import ExpertTable

_SHAPE = ModelShape(
    layers=1,
    experts=6,
    top_k=2,
    n_embd=64,
    n_ff=32,
    heads=1,
    kv_heads=1,
    head_dim=64,
    vocab=300,
    seed=1,
    gate_up_type="F32",
    down_type="F32",
)
_N_SLOTS = 3
_TOLERANCE = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test; return 0 when the plugin computes what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", type=Path, required=True)
    parser.add_argument("--host", type=Path, required=True)
    parser.add_argument("library", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    try:
        report = run(options.library, options.proxy, options.host)
    except (ExpertierError, OSError, MemoryError) as error:
        reason = str(error) if isinstance(error, ExpertierError) else explain(error)
        print(json.dumps({"ok": False, "error": reason}))
        return 1
    print(json.dumps({"ok": True, **report}))
    return 0


def run(libraries: Sequence[Path], proxy: Path, host: Path) -> dict[str, Any]:
    """Load the engine with the plugin, check one product, and return what the engine says of itself."""
    engine = LoadedEngine.load(libraries, proxy, host)
    with temporary_folder("expertier-selftest-", "the plugin's self-test") as folder:
        path = write_model(folder / "selftest.gguf", _SHAPE)
        table = ExpertTable.from_gguf(path)
        budget = plan_bytes(table, _N_SLOTS)
        with TierManager(
            table, device=open_device("host"), config=TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
        ) as tiers:
            check_product(engine, tiers, rows=1)  # fewer experts than slots
            check_product(engine, tiers, rows=16)  # more experts than slots, so that it runs in passes
    return {
        "ggml_version": engine.ggml_version,
        "api_version": engine.api_version,
        "defaults": engine.defaults(),
        "devices": [device["name"] for device in engine.devices()],
    }


def plan_bytes(table: ExpertTable, n_slots: int) -> int:
    """Return the budget that gives every layer exactly `n_slots` slots."""
    return sum(demand.bytes_for(n_slots) for demand in table.layer_demands())


def check_product(engine: LoadedEngine, tiers: TierManager, rows: int) -> None:
    """Compare MUL_MAT_ID over the up matrices of layer 0 with NumPy.

    Raises:
        EngineMismatchError: a value differs, or the engine reports an error.
    """
    table = tiers.table
    index, matrix = next((i, m) for i, m in enumerate(table.layers[0].matrices) if m.role == "up")
    n_experts = table.layers[0].n_experts
    weights = np.fromfile(
        table.path, np.float32, n_experts * matrix.ne1 * matrix.ne0, offset=matrix.file_offset
    )
    weights = weights.reshape(n_experts, matrix.ne1, matrix.ne0)
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, matrix.ne0), np.float32)
    ids = np.stack([random.permutation(n_experts)[: table.top_k] for _ in range(rows)]).astype(np.int32)
    expected = np.einsum("tkmn,tn->tkm", weights[ids], x)
    result = np.full_like(expected, np.nan)

    with interrupts_deferred():
        status, message, cause = _compute(engine, tiers, matrix, x, ids, result)
    if status:
        raise EngineMismatchError(
            f"the engine returned status {status} for matrix {index}: {message} {cause or ''}"
        )
    error = float(np.max(np.abs(result - expected)))
    if not error <= _TOLERANCE * float(np.max(np.abs(expected))):
        raise EngineMismatchError(
            f"a product of {rows} row(s) came out wrong by {error:g} (largest value {np.max(np.abs(expected)):g})"
        )


def _compute(
    engine: LoadedEngine, tiers: TierManager, matrix: ExpertMatrix, x: Any, ids: Any, result: Any
) -> tuple[int, str, BaseException | None]:
    """Have the engine compute one product; return its status, and the proxy's error message."""
    binding = TierBinding(engine, tiers)
    try:
        binding.begin_load()
        try:
            status: int = engine.host.expertier_host_mul_mat_id(
                binding.device,
                binding.buffer_type,
                matrix.name.encode(),
                matrix.ne0,
                matrix.ne1,
                tiers.table.layers[0].n_experts,
                x.ctypes.data,
                ids.ctypes.data,
                ids.shape[1],
                len(x),
                result.ctypes.data,
            )
        finally:
            binding.end_load()
        message, cause = binding.take_error()
        return status, message, cause
    finally:
        binding.close()


if __name__ == "__main__":
    sys.exit(run_as_child(main))
