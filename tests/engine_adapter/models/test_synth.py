from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from expertier.engine_adapter.models.synth import TINY_SHAPE, ModelShape, write_model
from expertier.engine_adapter.models.synth_blocks import WEIGHT_TYPES, WeightType
from expertier.errors import ConfigError

SMALL = dataclasses.replace(TINY_SHAPE, layers=2, experts=4, top_k=2, vocab=300)


def tensors(path: Path) -> dict[str, object]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_file_holds_what_the_shape_says(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", SMALL)
    reader = GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "qwen3moe"
    assert values["qwen3moe.block_count"] == 2
    assert values["qwen3moe.expert_count"] == 4
    assert values["qwen3moe.expert_used_count"] == 2
    assert values["qwen3moe.embedding_length"] == 256
    assert len(values["tokenizer.ggml.tokens"]) == 300
    assert len(set(values["tokenizer.ggml.tokens"])) == 300
    shapes = {tensor.name: (tensor.tensor_type.name, tuple(tensor.shape)) for tensor in reader.tensors}
    assert len(shapes) == 3 + 2 * 12
    assert shapes["token_embd.weight"] == ("F32", (256, 300))
    assert shapes["blk.1.ffn_gate_exps.weight"] == ("Q4_K", (256, 256, 4))
    assert shapes["blk.1.ffn_up_exps.weight"] == ("Q4_K", (256, 256, 4))
    assert shapes["blk.1.ffn_down_exps.weight"] == ("Q6_K", (256, 256, 4))
    assert shapes["blk.0.ffn_gate_inp.weight"] == ("F32", (256, 4))
    experts = [tensor for tensor in reader.tensors if "_exps." in tensor.name]
    assert sum(tensor.n_bytes for tensor in experts) == SMALL.expert_bytes_total


def test_the_same_shape_gives_the_same_bytes(tmp_path: Path) -> None:
    first = digest(write_model(tmp_path / "a.gguf", SMALL))
    assert digest(write_model(tmp_path / "b.gguf", SMALL)) == first
    other = dataclasses.replace(SMALL, seed=SMALL.seed + 1)
    assert digest(write_model(tmp_path / "c.gguf", other)) != first


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_every_type_can_be_every_experts(tmp_path: Path, kind: WeightType) -> None:
    shape = dataclasses.replace(SMALL, gate_up_type=kind, down_type=kind, dense_type="Q8_0")
    for name, tensor in tensors(write_model(tmp_path / "m.gguf", shape)).items():
        if "_exps." in name:
            assert tensor.tensor_type.name == kind
            values = dequantize(tensor.data, tensor.tensor_type)
            assert np.isfinite(values).all()
            assert 0.01 < values.std() < 1


def test_no_two_experts_are_alike(tmp_path: Path) -> None:
    every = tensors(write_model(tmp_path / "m.gguf", SMALL))
    data = np.concatenate([every[f"blk.{n}.ffn_up_exps.weight"].data for n in range(2)])
    assert len(np.unique(data.reshape(8, -1), axis=0)) == 8


def test_routers_have_popular_experts_only_when_asked(tmp_path: Path) -> None:
    def spread(skew: float) -> float:
        shape = dataclasses.replace(TINY_SHAPE, router_skew=skew)
        path = write_model(tmp_path / "m.gguf", shape)
        norms = np.linalg.norm(tensors(path)["blk.0.ffn_gate_inp.weight"].data, axis=1)
        return float(norms.max() / norms.min())

    assert spread(0.0) < 1.5
    assert spread(0.6) > 2.0


@pytest.mark.parametrize("dense", ["F32", "Q8_0"])
def test_control_and_byte_tokens_have_no_logit(tmp_path: Path, dense: WeightType) -> None:
    shape = dataclasses.replace(SMALL, dense_type=dense)
    tensor = tensors(write_model(tmp_path / "m.gguf", shape))["output.weight"]
    rows = np.abs(dequantize(tensor.data, tensor.tensor_type)).sum(axis=1)
    assert (rows[:259] == 0).all()
    assert (rows[259:] > 0).all()


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_model(tmp_path / "m.gguf", SMALL, progress=lambda *step: seen.append(step))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][1] <= path.stat().st_size


def test_an_interrupted_model_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("the old one")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(path, SMALL, progress=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_text() == "the old one"
    write_model(path, SMALL)
    assert len(tensors(path)) == 27


def test_no_such_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_model(tmp_path / "nowhere" / "m.gguf", SMALL)


def test_a_bad_shape_never_reaches_the_disk() -> None:
    with pytest.raises(ConfigError):
        ModelShape(**{**dataclasses.asdict(SMALL), "n_embd": 100})
