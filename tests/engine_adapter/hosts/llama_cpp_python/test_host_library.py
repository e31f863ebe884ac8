"""What the host library does for the drop-in, over the engine that the other tests run as well."""

from __future__ import annotations

import ctypes as ct

import pytest

from engine_runs.drop_in.stand_ins import Params
from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.errors import EngineError
from expertier.tiers.tier_set import TierSet


def test_parameters_of_another_size_are_refused(loaded_engine, model):
    with (
        make_tiers(model, 2) as tiers,
        pytest.raises(EngineError, match=r"llama_model_params have 16 bytes, but the engine's"),
    ):
        LlamaModel.open(loaded_engine, model, tiers=TierSet.of(tiers), params=Params())


def test_a_model_that_was_handed_over_is_freed_by_who_has_it(loaded_engine, model):
    with make_tiers(model, 2) as tiers:
        opened = LlamaModel.open(loaded_engine, model, tiers=TierSet.of(tiers))
        handle = opened.hand_over()
        free = loaded_engine.symbol("llama_model_free", None, ct.c_void_p)
        assert opened.n_vocab == loaded_engine.symbol("llama_vocab_n_tokens", ct.c_int32, ct.c_void_p)(
            loaded_engine.symbol("llama_model_get_vocab", ct.c_void_p, ct.c_void_p)(handle)
        )
        free(handle)
        opened.close()


def test_the_devices_of_other_loads_are_none_of_ours(loaded_engine):
    assert loaded_engine.proxy
    devices = ct.cast(loaded_engine.stock_devices(), ct.POINTER(ct.c_void_p))
    assert devices[0] is None, "this machine's engine has the CPU only"
