"""How a tool of the user's own llama.cpp is started: its arguments, its variables, and what is refused before."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.hosts.exec import tool as exec_tool
from expertier.engine_adapter.hosts.exec.tool import MODEL_VARIABLE, prepare_tool
from expertier.engine_adapter.placement.placement import Placement
from expertier.errors import BudgetError, ConfigError, EngineMissingError, NotGgufError
from expertier.tiers.model.table import ExpertTable


class ToyPlugin:
    """Stands in for a built plugin."""

    proxy_path = Path("/somewhere/libexpertier_proxy.so")


@pytest.fixture
def asked(monkeypatch):
    """The folders that a plugin was asked for."""
    folders = []

    def prepare(folder, _progress):
        folders.append(Path(folder))
        return SimpleNamespace(has_gpu_backends=False), ToyPlugin()

    monkeypatch.setattr(exec_tool, "prepare_engine", prepare)
    return folders


@pytest.fixture
def model(tmp_path):
    return write_small_model(tmp_path, "F32")


@pytest.fixture
def tool(tmp_path, monkeypatch, asked):
    """A llama-server in a llama.cpp folder of the user's."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert asked == []
    path = tmp_path / "llama.cpp" / "build" / "bin" / "llama-server"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_tool_gets_the_skeleton_and_the_variables(tool, model, asked, tmp_path):
    prepared = prepare_tool(
        [str(tool), "--port", "80", "-m", str(model), "-c", "4096"], environ={"HOME": "/h"}
    )
    assert asked == [tmp_path / "llama.cpp"]
    assert prepared.program == tool
    name, option, skeleton, *rest = prepared.arguments
    assert (name, option) == (str(tool), "-m")
    assert rest == ["--port", "80", "-c", "4096"]
    assert Path(skeleton) != model
    assert ExpertTable.from_gguf(skeleton).layers == ExpertTable.from_gguf(model).layers
    env = prepared.environment
    assert env["HOME"] == "/h"
    assert env["GGML_BACKEND_PATH"] == str(ToyPlugin.proxy_path)
    assert env[MODEL_VARIABLE] == str(model)
    assert env["LLAMA_ARG_DEVICE"] == "TIER_CPU"
    assert env["LLAMA_ARG_OVERRIDE_TENSOR"].endswith("=EXPERTS_CPU")
    assert "," not in env["LLAMA_ARG_OVERRIDE_TENSOR"]
    assert env["LLAMA_ARG_OVERRIDE_TENSOR"].count("=") == 1
    assert Path(env["EXPERTIER_EMBED_LIBPYTHON"]).exists()


def test_tensors_are_not_split_in_a_tool(tool, model, asked):
    with pytest.raises(ConfigError, match=r"MOE_SPLIT_MODE=tensor was asked for with llama-server.*`layer`"):
        prepare_tool([str(tool), "-m", str(model)], environ={"MOE_SPLIT_MODE": "tensor"})
    assert asked == [], "nothing was built first"


def test_llama_bench_reads_no_variables(tool, model):
    bench = tool.with_name("llama-bench")
    tool.rename(bench)
    prepared = prepare_tool([str(bench), "--model", str(model), "-p", "64"], environ={})
    assert "LLAMA_ARG_DEVICE" not in prepared.environment
    assert prepared.arguments[3:8] == ("-p", "64", "-dev", "TIER_CPU", "-ngl")


def test_layers_over_two_devices(tool, model, monkeypatch):
    """Each device gets its own experts, by its own pattern, and the blocks that the tiers in the tool count on."""
    placement = Placement(("CUDA0", "CUDA1"), (1, 3))
    monkeypatch.setattr(exec_tool, "_placement", lambda *_: placement)
    env = prepare_tool([str(tool), "-m", str(model)], environ={}).environment
    assert env["LLAMA_ARG_DEVICE"] == "TIER_CUDA0,TIER_CUDA1"
    assert env["LLAMA_ARG_SPLIT_MODE"] == "layer"
    assert env["LLAMA_ARG_TENSOR_SPLIT"] == env["MOE_TENSOR_SPLIT"] == "1,3"
    assert env["MOE_DEVICE"] == "CUDA0,CUDA1"
    patterns = dict(each.rsplit("=", 1)[::-1] for each in env["LLAMA_ARG_OVERRIDE_TENSOR"].split(","))
    table = ExpertTable.from_gguf(model)
    for layer in table.layers:
        for matrix in layer.matrices:
            found = [name for name, pattern in patterns.items() if re.search(pattern, matrix.name)]
            assert found == [f"EXPERTS_CUDA{int(layer.block >= 1)}"]
    assert not any(re.search(pattern, "blk.0.ffn_gate_inp.weight") for pattern in patterns.values())
    bench = tool.with_name("llama-bench")
    tool.rename(bench)
    arguments = prepare_tool([str(bench), "-m", str(model)], environ={}).arguments
    options = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    assert (options["-dev"], options["-sm"], options["-ts"]) == ("TIER_CUDA0/TIER_CUDA1", "layer", "1/3")
    assert options["-ot"].count(";") == 1
    assert "," not in options["-ot"], "that would be two tests"


@pytest.mark.parametrize("given", [["-sm", "none"], ["--device", "TIER_CUDA0"], ["-ts", "1,1"]])
def test_what_would_undo_a_split_is_refused(tool, model, monkeypatch, given):
    monkeypatch.setattr(exec_tool, "_placement", lambda *_: Placement(("CUDA0", "CUDA1"), (1, 3)))
    with pytest.raises(ConfigError, match=f"got {given[0]}"):
        prepare_tool([str(tool), "-m", str(model), *given], environ={})


def test_the_model_may_come_from_the_variable(tool, model):
    prepared = prepare_tool([str(tool)], environ={"LLAMA_ARG_MODEL": str(model)})
    assert prepared.environment[MODEL_VARIABLE] == str(model)


def test_the_folder_may_be_named(tool, model, asked, tmp_path):
    prepare_tool([str(tool), "-m", str(model)], llama_cpp=tmp_path, environ={})
    assert asked == [tmp_path]


def test_no_tool_and_no_model(tool):
    with pytest.raises(ConfigError, match="expertier exec -- llama-server"):
        prepare_tool([], environ={})
    with pytest.raises(ConfigError, match="names no model"):
        prepare_tool([str(tool), "--port", "80"], environ={})
    with pytest.raises(EngineMissingError, match="no program llama-nothing"):
        prepare_tool(["llama-nothing", "-m", "x"], environ={})


def test_bad_models_and_budgets_fail_before_anything_is_built(tool, model, asked, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(NotGgufError):
        prepare_tool([str(tool), "-m", str(text)], environ={})
    with pytest.raises(BudgetError):
        prepare_tool([str(tool), "-m", str(model)], environ={"MOE_EXPERT_CACHE_MIB": "0.01"})
    with pytest.raises(ConfigError, match="MOE_HOST_POOL_MIB"):
        prepare_tool([str(tool), "-m", str(model)], environ={"MOE_HOST_POL_MIB": "1"})
    assert asked == []
    assert not (tmp_path / "cache").exists()


def test_a_python_without_a_shared_library_is_refused(tool, model, monkeypatch):
    monkeypatch.setattr(exec_tool.sysconfig, "get_config_var", lambda _: None)
    with pytest.raises(EngineMissingError, match="apt install libpython3"):
        prepare_tool([str(tool), "-m", str(model)], environ={})
    assert sys.base_prefix
