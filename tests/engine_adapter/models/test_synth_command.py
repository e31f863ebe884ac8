"""`expertier synth`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from expertier.tiers.model.table import ExpertTable
from model_files.trace_models import random_ids
from servers.warm_commands import WarmCommands

Synth = Callable[..., subprocess.CompletedProcess[str]]
IDS = random_ids(steps=40, layers=3, experts=12, top_k=2)


@pytest.fixture
def synth(warm_commands: WarmCommands) -> Synth:
    """Run `expertier synth ARGUMENTS`."""

    def synth(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["synth", *map(str, arguments)]
        return subprocess.CompletedProcess(command, *warm_commands.run(command, dict(os.environ)))

    return synth


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "routing.npz"
    np.savez(path, ids=IDS, offsets=np.array([0, 10, 40]))
    return path


def test_sizes_that_fit_are_chosen(synth: Synth, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    ended = synth("--trace", trace, "-o", path, "--json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout.splitlines()[-1])
    table = ExpertTable.from_gguf(path)
    assert document["model"] == str(path)
    assert document["file_bytes"] == path.stat().st_size
    assert document["expert_bytes"] == table.expert_bytes_total
    assert (document["layers"], document["experts"], document["top_k"]) == (3, 16, 2)
    assert document["steps"] == 40
    assert document["n_embd"] == 256, "whole blocks of Q4_K that hold 3 x 16 coordinates"
    assert document["codes"] == "per-layer"
    assert table.architecture == "qwen3moe"


def test_what_is_asked_for_is_written(synth: Synth, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    sizes = ("--sequence", 1, "--steps", 12, "--experts", 24, "--n-embd", 64, "--n-ff", 96)
    types = ("--gate-up-type", "MXFP4", "--down-type", "Q8_0", "--dense-type", "F16")
    ended = synth("--trace", trace, "-o", path, "--architecture", "gpt-oss", "--repeat", *sizes, *types)
    assert ended.returncode == 0, ended.stderr
    assert "orthogonal" in ended.stdout
    reader = GGUFReader(path)
    shapes = {tensor.name: (tensor.tensor_type.name, tuple(tensor.shape)) for tensor in reader.tensors}
    assert shapes["blk.2.ffn_up_exps.weight"] == ("MXFP4", (64, 96, 24))
    assert shapes["blk.2.ffn_down_exps.weight"] == ("Q8_0", (96, 64, 24))
    assert shapes["token_embd.weight"] == ("F16", (64, 259 + 12))
    assert shapes["blk.0.attn_q.weight"][0] == "F16"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--n-embd", 32, "--gate-up-type", "Q8_0", "--head-dim", 32), "make n_embd at least 48"),
        (("--experts", 8), "expert 11, but the model is to have 8 experts"),
        (("--sequence", 2), "sequence 2"),
        (("--down-type", "Q9"), "no weights of type 'Q9' can be made: give one of F32"),
        (("--architecture", "glm4moe"), "glm4moe models cannot replay"),
        (("--architecture", "rwkv"), "no models of the architecture 'rwkv'"),
        (("--layout", "fused"), "expert_layout is 'fused'"),
        (("--n-ff", 100), "n_ff is 100; it must be a multiple of 256"),
    ],
)
def test_what_cannot_be_is_refused(
    synth: Synth, trace: Path, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    ended = synth("--trace", trace, "-o", tmp_path / "m.gguf", *arguments)
    assert ended.returncode == 2, ended
    assert "error:" in ended.stderr
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npz"]
