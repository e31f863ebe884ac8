"""What the engine reads of the experts for itself is the file's bytes, or fails: a saved model, pieces, adapters."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from engine_runs.read_back import assert_read_in_pieces, engine_model
from engine_runs.tiered_runs import SMALL, make_tiers, prompt_tokens, run_model
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.engine_adapter.models.synth import write_model
from expertier.errors import ModelError, SourceError
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from failures.failing_reads import FailingReads
from model_files.lora_files import write_lora
from model_files.shard_files import split_model


def tensors_of(path: Path) -> dict[str, tuple[int, bytes]]:
    return {t.name: (int(t.tensor_type), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("n_slots", [1, SMALL.experts])
def test_a_saved_model_is_the_model(loaded_engine: LoadedEngine, path: Path, tmp_path: Path, n_slots: int):
    saved = tmp_path / "saved.gguf"
    with (
        make_tiers(path, n_slots) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        engine_model(loaded_engine, model) as own,
    ):
        own.save(saved)
        assert tiers.stats().l1.misses == 0, "the slots are for those who compute"
        tiers.check_valid()
        assert model.binding is not None
        assert model.binding.take_error() == ("", None)
    assert tensors_of(saved) == tensors_of(path)
    expected = run_model(loaded_engine, path, None, n_tokens=4, prompt=prompt_tokens(8))
    found = run_model(loaded_engine, saved, None, n_tokens=4, prompt=prompt_tokens(8))
    assert found.logits.tobytes() == expected.logits.tobytes()


@pytest.mark.parametrize("nth", [1, 20, 3 * 3 * SMALL.experts])
def test_a_read_that_fails_fails_the_save(
    loaded_engine: LoadedEngine,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    nth: int,
):
    saved = tmp_path / "saved.gguf"
    reads = FailingReads(monkeypatch)
    with (
        make_tiers(path, SMALL.top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
    ):
        with engine_model(loaded_engine, model) as own:
            loaded_engine.take_log(0)
            reads.fail_call(nth)
            own.save(saved)
            assert reads.failed == 1
            assert "failed to write GGUF data" in loaded_engine.take_log()
            assert model.binding is not None
            message, cause = model.binding.take_error()
            assert "the engine read expert tensor blk." in message
            assert isinstance(cause, SourceError)
            assert message in capfd.readouterr().err
            with pytest.raises(ModelError):
                ExpertTable.from_gguf(saved)

            own.save(saved)
            assert tensors_of(saved) == tensors_of(path), "the next one works"
        tiers.check_valid()


def test_any_piece_of_a_tensor(loaded_engine: LoadedEngine, path: Path):
    with (
        make_tiers(path, 1) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        engine_model(loaded_engine, model) as own,
    ):
        for layer in tiers.table.layers:
            for matrix in layer.matrices:
                assert_read_in_pieces(own, path.read_bytes(), layer, matrix)


def test_a_saved_model_of_shards(loaded_engine: LoadedEngine, path: Path, tmp_path: Path):
    first, *_ = split_model(path, tmp_path, 3)
    with (
        make_tiers(first, 1) as tiers,
        LlamaModel.open(loaded_engine, first, tiers=TierSet.of(tiers)) as model,
        engine_model(loaded_engine, model) as own,
    ):
        own.save(tmp_path / "saved.gguf")
    assert tensors_of(tmp_path / "saved.gguf") == tensors_of(path)


def test_a_read_while_misses_are_refused_fails(
    loaded_engine: LoadedEngine, path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A host whose Python cannot answer refuses misses in this way."""
    with (
        make_tiers(path, 1) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        engine_model(loaded_engine, model) as own,
    ):
        assert model.binding is not None
        model.binding.refuse_misses()
        own.save(tmp_path / "saved.gguf")
        assert "could not be read from the model's file" in capfd.readouterr().err
        with pytest.raises(ModelError):
            ExpertTable.from_gguf(tmp_path / "saved.gguf")
        model.binding.serve_misses()


def test_an_adapter_over_experts_is_refused_for_what_it_is(
    loaded_engine: LoadedEngine, path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    name = "blk.1.ffn_down_exps.weight"
    shapes = {name: (SMALL.experts, SMALL.n_embd, SMALL.n_ff)}
    over_experts = write_lora(tmp_path / "experts.gguf", SMALL.architecture, shapes)
    shapes = {"blk.1.attn_output.weight": (SMALL.n_embd, SMALL.attention_width)}
    beside = write_lora(tmp_path / "beside.gguf", SMALL.architecture, shapes)
    with (
        make_tiers(path, SMALL.top_k) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model,
        engine_model(loaded_engine, model) as own,
    ):
        assert own.load_adapter(over_experts) is None
        said = capfd.readouterr().err
        assert f"tensor {name}.lora_a is of a LoRA adapter over experts" in said
        assert "merge it into the model" in said
        assert own.load_adapter(beside) is not None
        with model.context(n_ctx=64, n_threads=1) as context:
            context.decode(prompt_tokens(8), 0)


def test_a_tensor_of_no_model_that_is_being_loaded(
    loaded_engine: LoadedEngine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second model whose experts are sent to the first one's place is refused by name, and the first one stays."""
    from expertier.engine_adapter.binding.tier_binding import TierBinding
    from expertier.errors import EngineError

    other = write_model(tmp_path / "other.gguf", SMALL)
    with (
        make_tiers(path, 1) as tiers,
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)),
        make_tiers(other, 1) as more,
    ):
        monkeypatch.setattr(TierBinding, "begin_load", lambda _self: None)
        with pytest.raises(EngineError, match=r"ffn_\w+_exps\.weight was placed among experts in the tiers"):
            LlamaModel.open(loaded_engine, other, tiers=TierSet.of(more))
