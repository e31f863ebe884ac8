"""Expert types that the engine has and the gguf package has not, and the other way round."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine_runs.tiered_runs import SMALL, prompt_tokens, run_model, write_small_model
from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.models import synth
from expertier.engine_adapter.models.synth import model_tensors, write_tensors
from expertier.errors import EngineError, UnsupportedLayoutError
from expertier.hip import open_device
from expertier.tiers.config.config import TierConfig
from expertier.tiers.manager import TierManager
from expertier.tiers.model.geometry import read_geometry
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, BlockSize, TypeSizes
from expertier.tiers.tier_set import TierSet

Q2_0 = 42
BLOCK = BlockSize(64, 18)  # a half, then two bits for each element
REMOVED = (4, 5, 31, 32, 33, 36, 37, 38)
UNKNOWN = 250


@dataclass(frozen=True)
class Q2Tensor:
    """Random experts of type Q2_0."""

    name: str
    dims: tuple[int, ...]
    kind: str = "Q2_0"

    @property
    def n_bytes(self) -> int:
        return prod(self.dims) // BLOCK.elements * BLOCK.n_bytes

    def chunks(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        blocks = rng.integers(0, 256, (prod(self.dims) // BLOCK.elements, BLOCK.n_bytes), dtype=np.uint8)
        factors = rng.uniform(0.8, 1.2, (len(blocks), 1)) / 1.2 / self.dims[-1] ** 0.5
        blocks[:, :2] = factors.astype(np.float16).view(np.uint8)
        yield blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose experts are of a type that the installed gguf package does not know."""
    assert PACKAGE_TYPES.block(Q2_0) is None, "this gguf package knows it: take another type"
    tensors = [
        Q2Tensor(tensor.name, tensor.dims) if re.search(r"ffn_\w+_exps\.weight$", tensor.name) else tensor
        for tensor in model_tensors(SMALL)
    ]
    with pytest.MonkeyPatch.context() as patch:
        real: Callable[[str], int] = synth.ggml_type
        patch.setattr(synth, "ggml_type", lambda kind: Q2_0 if kind == "Q2_0" else real(kind))
        return write_tensors(tmp_path_factory.mktemp("types") / "q2_0.gguf", SMALL, tensors)


def tiers_of(table: ExpertTable, n_slots: int) -> TierManager:
    budget = sum(demand.bytes_for(n_slots) for demand in table.layer_demands())
    config = TierConfig(expert_cache_bytes=budget, host_pool_bytes=0)
    return TierManager(table, device=open_device("host"), config=config)


def test_the_engine_says_how_large_its_types_are(loaded_engine: LoadedEngine):
    assert loaded_engine.block_size(Q2_0) == BLOCK
    for number in (*REMOVED, -1, 43, UNKNOWN, 1 << 30, -(1 << 31)):
        assert loaded_engine.block_size(number) is None, f"there is no type {number}"
    kinds = set(gguf.GGML_QUANT_SIZES) - {
        gguf.GGMLQuantizationType.Q8_1
    }  # in no file; the package is wrong there
    for kind in kinds:
        assert loaded_engine.block_size(int(kind)) == gguf.GGML_QUANT_SIZES[kind], kind


@pytest.mark.parametrize("n_slots", [1, SMALL.top_k, SMALL.experts])
def test_logits_are_those_of_stock(loaded_engine: LoadedEngine, path: Path, n_slots: int):
    table = ExpertTable.from_gguf(path, EngineTypes(lambda: loaded_engine))
    matrix = table.layers[0].matrices[0]
    assert (matrix.ggml_type, matrix.type_bytes) == (Q2_0, BLOCK.n_bytes)
    assert matrix.expert_bytes == SMALL.n_embd // 64 * 18 * SMALL.n_ff
    expected = run_model(loaded_engine, path, None, n_tokens=6, prompt=prompt_tokens(24))
    with tiers_of(table, n_slots) as tiers:
        found = run_model(loaded_engine, path, tiers, n_tokens=6, prompt=prompt_tokens(24))
        tiers.check_valid()
    assert np.isfinite(expected.logits).all()
    assert found.logits.tobytes() == expected.logits.tobytes()


def test_the_engine_is_asked_only_for_what_the_package_does_not_know(tmp_path: Path):
    def no_engine() -> LoadedEngine:
        raise AssertionError("an engine was opened")

    known = write_small_model(tmp_path, "Q8_0")
    assert ExpertTable.from_gguf(known, EngineTypes(no_engine)) == ExpertTable.from_gguf(known)


def test_without_an_engine_the_message_says_who_may_know(path: Path):
    with pytest.raises(UnsupportedLayoutError) as refused:
        ExpertTable.from_gguf(path)
    said = str(refused.value)
    assert "blk.0.ffn_gate_exps.weight" in said
    assert "ggml type 42" in said
    assert f"gguf package ({version('gguf')})" in said
    assert "`expertier run`" in said
    assert "EngineTypes" in said


def test_a_type_that_the_engine_does_not_know_either(loaded_engine: LoadedEngine, path: Path, tmp_path: Path):
    odd = of_type(path, tmp_path, Q2_0, UNKNOWN)
    with pytest.raises(UnsupportedLayoutError, match=r"ggml type 250, .* the engine .*xllamacpp.* knows"):
        ExpertTable.from_gguf(odd, EngineTypes(lambda: loaded_engine))


class Sizes:
    """Says of one type what nobody else does."""

    advice = "anyone knows"

    def __init__(self, ggml_type: int, block: BlockSize) -> None:
        self._own = {ggml_type: block}

    def block(self, ggml_type: int) -> BlockSize | None:
        return self._own.get(ggml_type) or PACKAGE_TYPES.block(ggml_type)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            UNKNOWN,
            Sizes(UNKNOWN, BLOCK),
            r"this llama\.cpp has no ggml type 250, which is the type of blk\.0\.ffn_gate_exps",
        ),
        (REMOVED[0], Sizes(REMOVED[0], BLOCK), r"this llama\.cpp has no ggml type 4,"),
        (
            Q2_0,
            Sizes(Q2_0, BlockSize(64, 16)),
            r"takes 16384 bytes by the gguf package and 18432 by this llama",
        ),
    ],
    ids=["newer than the engine", "removed", "of another size"],
)
def test_tables_that_the_engine_disagrees_with(
    loaded_engine: LoadedEngine, path: Path, tmp_path: Path, kind: int, sizes: TypeSizes, message: str
):
    """A package newer than the engine: refused by name, where ggml would end the process or take other bytes."""
    table = ExpertTable.from_gguf(of_type(path, tmp_path, Q2_0, kind), sizes)
    with tiers_of(table, 1) as tiers, pytest.raises(EngineError, match=message):
        LlamaModel.open(loaded_engine, table.path, tiers=TierSet.of(tiers))


def test_inspect_says_so(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from expertier.cli import app as cli

    monkeypatch.setattr("sys.argv", ["expertier", "inspect", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "An engine may know it: `expertier run`" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("loaded_engine")
def test_run_asks_its_engine(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from expertier.cli import app as cli

    command = [
        "run",
        str(path),
        "-p",
        "a",
        "-n",
        "2",
        "--threads",
        "1",
        "--json",
        "--expert-cache-mib",
        "auto",
    ]
    monkeypatch.setattr("sys.argv", ["expertier", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] > 0


def test_weights_of_unknown_types_are_said_to_be_uncounted(tmp_path: Path):
    known = write_small_model(tmp_path, "F32")
    data = known.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    assert data[place : place + 4] == bytes(4), "it is of type F32"
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(data[:place] + Q2_0.to_bytes(4, "little") + data[place + 4 :])
    before, found = read_geometry(known), read_geometry(odd)
    n_bytes = 4 * SMALL.n_embd * SMALL.attention_width
    assert before.device_weight_bytes - found.device_weight_bytes == n_bytes
    assert [note for note in found.notes if "ggml types 42" in note]
    assert found == replace(before, device_weight_bytes=found.device_weight_bytes, notes=found.notes)


def of_type(path: Path, folder: Path, before: int, after: int) -> Path:
    """The model with all its experts said to be of another type; their bytes stay."""
    data = bytearray(path.read_bytes())
    for match in re.finditer(rb"blk\.\d+\.ffn_(gate|up|down)_exps\.weight", bytes(data)):
        place = match.end() + 4 + 3 * 8
        assert data[place : place + 4] == before.to_bytes(4, "little")
        data[place : place + 4] = after.to_bytes(4, "little")
    odd = folder / "other-type.gguf"
    odd.write_bytes(data)
    return odd
