"""Where a stock model is placed: on a device by its name, with its experts in RAM, read instead of mapped."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from engine_runs.tiered_runs import make_tiers, prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.llama_cpp.generation import generate
from expertier.errors import ConfigError, EngineError
from expertier.tiers.tier_set import TierSet

OPTIONS = {
    "device": {"inner_device": "CPU"},
    "experts in RAM": {"inner_device": "CPU", "experts_in_ram": True},
    "read": {"inner_device": "CPU", "mapped": False},
    "both": {"inner_device": "CPU", "experts_in_ram": True, "mapped": False},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("placement"), "Q8_0")


@pytest.fixture(scope="module")
def expected(loaded_engine, path):
    return run_model(loaded_engine, path, None, n_tokens=8)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_placement_changes_no_logits(loaded_engine, path, expected, options):
    with (
        LlamaModel.open(loaded_engine, path, repack=False, **options) as model,
        model.context(n_ctx=512, n_threads=1) as context,
    ):
        done = generate(context, prompt_tokens(), 8, keep_logits=True)
        assert np.stack(done.logits).tobytes() == expected.logits.tobytes()
        assert context.n_graph_splits == 1


@pytest.mark.parametrize(("mapped", "told"), [(True, "CPU_Mapped model buffer"), (False, "CPU model buffer")])
def test_the_file_is_mapped_or_read(loaded_engine, path, mapped, told):
    loaded_engine.take_log(0)
    with LlamaModel.open(loaded_engine, path, repack=False, mapped=mapped):
        log = loaded_engine.take_log(0)
    assert told in log
    assert ("CPU_Mapped" in log) == mapped


_PLACE = """
import sys
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.open import open_engine
engine = open_engine()
LlamaModel.open(engine, sys.argv[1], inner_device="CPU", experts_in_ram=sys.argv[2] == "True").close()
print("overrides to CPU" in engine.take_log(0))
"""


@pytest.mark.parametrize("in_ram", [False, True])
def test_the_experts_are_placed_by_an_override(loaded_engine, path, in_ram):
    """The engine says so of the first such model of a process only; hence one of its own."""
    assert loaded_engine
    child = [sys.executable, "-c", _PLACE, str(path), str(in_ram)]
    done = subprocess.run(child, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(in_ram)]


def test_a_device_that_is_not_there(loaded_engine, path):
    with pytest.raises(EngineError, match=r"there is no device CUDA7, only .*CPU"):
        LlamaModel.open(loaded_engine, path, inner_device="CUDA7")


def test_stock_is_placed_by_name_beside_tiers(loaded_engine, path, expected):
    """With our devices registered, `CPU` is still the engine's own."""
    with (
        make_tiers(path, 3) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers), inner_device="CPU") as tiered,
        LlamaModel.open(loaded_engine, path, repack=False, inner_device="CPU") as stock,
    ):
        for model in (tiered, stock):
            with model.context(n_ctx=512, n_threads=1) as context:
                done = generate(context, prompt_tokens(), 8, keep_logits=True)
                assert np.stack(done.logits).tobytes() == expected.logits.tobytes()


@pytest.mark.parametrize("options", [{"experts_in_ram": True}, {"mapped": False}])
def test_options_of_stock_beside_tiers(loaded_engine, path, options):
    with make_tiers(path, 3) as tiers:
        with pytest.raises(ConfigError, match="together with tiers"):
            LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers), **options)
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)).close()  # nothing was bound


def test_the_engines_own_cache_is_asked_for(loaded_engine, path):
    """It needs a GPU, which the engine's words show to be what refused it: so the size has reached it."""
    with LlamaModel.open(loaded_engine, path, experts_in_ram=True, inner_device="CPU") as model:
        with pytest.raises(EngineError, match="MoE cache requires a GPU backend"):
            model.context(n_ctx=64, n_threads=1, moe_cache_bytes=1 << 20)
        model.context(n_ctx=64, n_threads=1, moe_cache_bytes=0).close()


def test_no_cache_of_the_engines_own_beside_tiers(loaded_engine, path):
    with make_tiers(path, 3) as tiers, LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model:
        for n_bytes in (1 << 20, -1):
            with pytest.raises(ConfigError, match=f"moe_cache_bytes is {n_bytes}"):
                model.context(n_ctx=64, moe_cache_bytes=n_bytes)
        model.context(n_ctx=64, n_threads=1).close()
