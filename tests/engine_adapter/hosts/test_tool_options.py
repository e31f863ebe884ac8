"""Options and variables of a tool that are refused, and those that are let through."""

from __future__ import annotations

import pytest

from engine_runs.tiered_runs import write_small_model
from expertier.engine_adapter.hosts.exec.options import check_options
from expertier.errors import ConfigError
from expertier.tiers.model.table import ExpertTable


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return ExpertTable.from_gguf(write_small_model(tmp_path_factory.mktemp("options"), "F32"))


REFUSED = (
    ("--fit on", "--fit on: the tool would place layers and tensors anew.*MOE_EXPERT_CACHE_MIB"),
    ("-fit 1", "-fit 1: "),
    ("-dev none", "-dev none: only a device of ours, such as TIER_CPU"),
    ("--device CUDA0", "--device CUDA0: "),
    ("-ngl 0", "-ngl 0: .*flash attention"),
    ("--n-gpu-layers 3", "--n-gpu-layers 3: "),
    ("-cmoe", "-cmoe: the experts are in the tiers"),
    ("--cpu_moe", "--cpu-moe: "),
    ("-ncmoe 2", "-ncmoe 2: "),
    ("-ot ffn_.*=CPU", "-ot ffn_.*=CPU: .*match no ffn_"),
    ("-ot output=CPU,blk.1.ffn_up_exps.weight=CPU", "-ot output=CPU,"),
    ("-ot output.weight=EXPERTS_CPU", "EXPERTS_CPU"),
    ("-otd exps=EXPERTS_CPU", "for the experts of the model of -m"),
    ("--moe-cache-mib 512", "llama.cpp's own cache"),
    ("-lm mmap", "none or dio"),
    ("--load-mode mlock", "mlock pins it"),
    ("--mlock", "mlock pins it"),
    ("-sm tensor", "layer or none"),
    ("--split-mode row", "layer or none"),
    ("--check-tensors", "a copy without experts"),
    ("-hf someone/something", "the one model of -m"),
    ("--model_url http://127.0.0.1/m.gguf", "download the model first"),
    ("--models-dir .", "the one model of -m"),
)
LET_THROUGH = (
    "",
    "--fit off",
    "-fit 0",
    "-dev TIER_CPU",
    "-ngl 999",
    "-ngl all",
    "-ngl -1",
    "-ngl 4",
    "-ncmoe 0",
    "-ot token_embd=CPU,output=CPU",
    "-ot [=CPU",
    "-otd exps=CPU",
    "--moe-cache-mib 0",
    "-lm none",
    "-lm dio",
    "--no-mmap",
    "-sm none",
    "-mg 0",
    "--no-op-offload --no-kv-offload --no-host --no-repack -ncffn 2 -lzm on",
    "-md draft.gguf -cmoed -ngld 0 --lora a.gguf",
)
VARIABLES = (
    ("LLAMA_ARG_CPU_MOE", "1", "0"),
    ("LLAMA_ARG_N_CPU_MOE", "3", "0"),
    ("LLAMA_ARG_OVERRIDE_TENSOR", "exps=CPU", "output=CPU"),
    ("LLAMA_ARG_SPEC_DRAFT_OVERRIDE_TENSOR", "exps=EXPERTS_CPU", "exps=CPU"),
    ("LLAMA_ARG_MOE_CACHE_MIB", "100", "0"),
    ("LLAMA_ARG_SPLIT_MODE", "row", "layer"),
    ("LLAMA_ARG_HF_REPO", "someone/something", ""),
)


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_refused(table, arguments, words):
    with pytest.raises(ConfigError, match=f"llama-server got .*{words}"):
        check_options("llama-server", ["--port", "80", *arguments.split()], {}, table)


@pytest.mark.parametrize("arguments", LET_THROUGH)
def test_let_through(table, arguments):
    for tool in ("llama-server", "llama-cli"):
        check_options(tool, arguments.split(), {}, table)


@pytest.mark.parametrize(("name", "bad", "good"), VARIABLES)
def test_variables(table, name, bad, good):
    check_options("llama-server", [], {name: good}, table)
    check_options("llama-bench", [], {name: bad}, table)  # which reads none
    with pytest.raises(ConfigError, match=f"got {name}={bad}"):
        check_options("llama-server", [], {name: bad}, table)


@pytest.mark.parametrize(
    "arguments", ["-ngl 999", "-dev TIER_CPU", "-ot a=CPU", "-lm none", "-ncmoe 1", "-fitt 1"]
)
def test_llama_bench_would_run_each_test_twice(table, arguments):
    with pytest.raises(ConfigError, match="llama-bench got"):
        check_options("llama-bench", arguments.split(), {}, table)
    check_options("llama-bench", ["-p", "32", "-n", "8", "-sm", "none", "-ncmoe", "0"], {}, table)
