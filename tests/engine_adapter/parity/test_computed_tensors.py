"""The file of all that a context computes, and finding in it where two runs part."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, make_tiers, prompt_tokens, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import EngineError
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _parts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("computed"), "F32")


def compute(engine, path, tensors_path, n_slots=None):
    """Run 20 tokens and one more; the logits of the last."""
    tiers = TierSet.of(make_tiers(path, n_slots)) if n_slots else None
    try:
        with (
            LlamaModel.open(engine, path, tiers=tiers, repack=False) as model,
            model.context(n_ctx=64, n_threads=1, tensors_path=tensors_path) as context,
        ):
            context.decode(prompt_tokens(20), 0)
            context.decode([300], 20)
            return context.logits().tobytes()
    finally:
        if tiers is not None:
            tiers.close()


@pytest.mark.parametrize("n_slots", [1, 5, SMALL.experts])
def test_tiers_compute_what_stock_does(loaded_engine, path, tmp_path, n_slots):
    from gpu.tensors import first_difference, read_tensors

    logits = compute(loaded_engine, path, None)
    assert compute(loaded_engine, path, tmp_path / "stock") == logits, "looking on changes nothing"
    assert compute(loaded_engine, path, tmp_path / "ours", n_slots) == logits
    found = first_difference(tmp_path / "stock", tmp_path / "ours")
    computed = list(read_tensors(tmp_path / "ours"))
    names = [tensor.name for tensor in computed]
    assert found["tensor"] is None
    assert 100 < found["equal_before"] < len(computed), "unnamed ones are left out"
    for layer in range(SMALL.layers):
        for name in ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down"):
            assert names.count(f"{name}-{layer}") == 2, "two graphs"
    assert names.count("result_output") == 2
    assert computed[-1].name == "result_output"
    assert computed[-1].values.tobytes() == logits
    gate = next(tensor for tensor in computed if tensor.name == "ffn_moe_gate-0")
    assert gate.ne == (SMALL.n_ff, SMALL.top_k, 20, 1)


def test_where_runs_part(loaded_engine, path, tmp_path):
    """The same model but for the down matrices of layer 1, which are 1.5 times as large."""
    from gpu.tensors import first_difference

    other = tmp_path / "other.gguf"
    shutil.copy(path, other)
    down = next(m for m in ExpertTable.from_gguf(path).layers[1].matrices if m.role == "down")
    n_values = SMALL.experts * down.ne0 * down.ne1
    weights = np.memmap(other, np.float32, "r+", down.file_offset, (n_values,))
    weights *= 1.5
    weights.flush()
    compute(loaded_engine, path, tmp_path / "one")
    compute(loaded_engine, other, tmp_path / "two", 5)
    found = first_difference(tmp_path / "one", tmp_path / "two")
    assert (found["tensor"], found["graph"]) == ("ffn_moe_down-1", 1)
    assert found["ne"] == (SMALL.n_embd, SMALL.top_k, 20, 1)
    assert found["values"] == SMALL.n_embd * SMALL.top_k * 20
    assert 0.9 * found["values"] < found["differing_values"] <= found["values"]
    assert 0 < 0.5 * found["mean_magnitude"] < found["max_difference"]
    assert found["equal_before"] > 30


def test_graphs_that_are_not_alike(loaded_engine, path, tmp_path):
    from gpu.tensors import first_difference

    compute(loaded_engine, path, tmp_path / "one")
    shutil.copy(tmp_path / "one", tmp_path / "shorter")
    with (tmp_path / "shorter").open("r+b") as file:
        file.truncate((tmp_path / "one").stat().st_size - 4 * SMALL.vocab - len("result_output") - 40)
    found = first_difference(tmp_path / "shorter", tmp_path / "one")
    assert found["unlike"] == ["nothing", f"result_output {(SMALL.vocab, 1, 1, 1)}"]


def test_files_that_cannot_be_written(loaded_engine, path, tmp_path):
    with LlamaModel.open(loaded_engine, path) as model:
        missing = tmp_path / "no folder" / "tensors"
        with pytest.raises(EngineError, match="no folder/tensors: No such file or directory"):
            model.context(n_ctx=64, n_threads=1, tensors_path=missing)
        context = model.context(n_ctx=64, n_threads=1, tensors_path="/dev/full")
        context.decode(prompt_tokens(20), 0)
        with pytest.raises(EngineError, match="is the disk full"):
            context.close()
        context.close()
